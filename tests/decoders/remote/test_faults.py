"""Servers that fail: retries, their number, failures without a retry, and error messages."""

from __future__ import annotations

import json
import time
from email.utils import formatdate
from typing import Any

import pytest

from tot.decoders import Message, ModelError, Request, RequestError, Sampling
from tot.decoders.errors import RefusedError, ServerError

PASSING = [408, 409, 429, 500, 502, 503, 504, 529]
LOST = ["reset", "truncated body", "no body"]
"""Unreadable replies that are the connection's fault."""
UNREADABLE = [
    *("malformed JSON", "empty body", "JSON of another shape", "no choices", "null", "bytes", "plain text"),
    *("broken off", "neither message nor text", "message of null", "content of another shape"),
    *("error with status 200", "error with choices of null"),
]


def ask(text: str = "q", **sampling: Any) -> Request:
    return Request(prompt=(Message(role="user", content=text),), sampling=Sampling(**sampling))


def text_of(server: Any) -> str:
    """Return the server's reply to its last received body."""
    return server.hashed("", server.posts[-1].body)[0]["text"]


def error(message: str, **fields: Any) -> bytes:
    return json.dumps({"error": {"message": message, **fields}}).encode()


# -- retries ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", LOST + UNREADABLE)
def test_a_broken_reply_is_retried(server: Any, remote: Any, broken: Any, name: str) -> None:
    server.faults += [broken[name]] * 2
    (completion,) = remote().generate([ask()])
    assert (completion.text, len(server.posts)) == (text_of(server), 3)


@pytest.mark.parametrize("given", ["0.01", "soon", "nan", "inf", "-1e999", "", "Wed, 99 Foo 2026 00:00:00 GMT"])
def test_an_invalid_retry_after_still_leads_to_a_retry(server: Any, remote: Any, fault: Any, given: str) -> None:
    server.faults += [fault(429, {"retry-after": given})]
    (completion,) = remote().generate([ask()])
    assert completion.text == text_of(server)


@pytest.mark.parametrize("name", UNREADABLE)
def test_a_reply_that_is_always_unreadable_fails_its_request(server: Any, remote: Any, broken: Any, name: str) -> None:
    server.always = broken[name]
    with pytest.raises(RequestError, match=r"fails for this request \(.*, 2 times\)"):
        remote(retries=1).generate([ask()])
    assert len(server.posts) == 2


@pytest.mark.parametrize(
    ("status", "words"),
    [
        *((status, "busy") for status in PASSING),
        *((500, "server overloaded"), (500, "Loading model"), (503, "not supported"), (502, "boom")),
    ],
)
def test_an_outage_is_retried_to_the_end_and_the_error_explains_how_to_resume(
    server: Any, remote: Any, fault: Any, status: int, words: str
) -> None:
    server.always = fault(status, raw=error(words))
    with pytest.raises(
        ModelError, match=rf"does not answer \({status}: {words}, 7 times\).*start .* then resume with --resume"
    ):
        remote(retries=6).generate([ask()])
    assert len(server.posts) == 7


@pytest.mark.parametrize(
    ("status", "headers", "seconds"),
    [
        (429, {"retry-after": "3600"}, "3600"),
        (503, {"retry-after-ms": "600000"}, "600"),
        (503, {"retry-after": formatdate(time.time() + 900)}, r"\d{3}"),
    ],
)
def test_a_long_retry_after_stops_the_run(
    server: Any, remote: Any, fault: Any, caplog: Any, status: int, headers: dict[str, str], seconds: str
) -> None:
    server.always = fault(status, headers, raw=b'{"error": "later"}')
    message = rf"does not answer \({status}: later; its Retry-After is {seconds} s, longer than the maximum of 120 s\)"
    with pytest.raises(ModelError, match=f"{message}: start or restart it, then resume with --resume"):
        remote().generate([ask()])
    assert (len(server.posts), "retrying" in caplog.text) == (1, False)


def test_a_500_with_the_same_message_four_times_is_permanent(server: Any, remote: Any, fault: Any) -> None:
    server.always = fault(500, raw=error("tensor shapes differ"))
    with pytest.raises(RequestError, match=r"fails for this request \(500: tensor shapes differ, 4 times\)"):
        remote(retries=10).generate([ask()])
    assert len(server.posts) == 4


def test_a_server_that_fails_at_three_requests_in_a_row_ends_the_run(server: Any, remote: Any, fault: Any) -> None:
    decoder = remote(retries=0)
    server.always = fault(500, raw=error("engine died"))
    for _ in range(2):
        with pytest.raises(RequestError, match="fails for this request"):
            decoder.generate([ask()])
    with pytest.raises(ModelError, match=r"fails for every request \(500: engine died\).*--resume"):
        decoder.generate([ask()])
    server.always = None
    decoder.generate([ask()])
    server.always = fault(raw=b"{}")
    with pytest.raises(RequestError, match="fails for this request"):  # the good reply resets the count
        decoder.generate([ask()])


# -- errors without a retry ---------------------------------------------------------------------------------------

ABOUT_THE_REQUEST = [
    "Only one completion choice is allowed",
    "logprobs is not supported for models created with logits_all=False",
    "Jinja Exception: Conversation roles must alternate user/assistant/user/assistant/...",
    "System role not supported",
    "the request exceeds the available context size. try increasing the context size",
    "Invalid argument: stop",
    "This model does not support n > 1: not implemented",
]
"""Messages of a 500 or 501 that the request caused."""
HTML = {"content-type": "text/html"}
LENGTH = "maximum context length is 2048 tokens"


@pytest.mark.parametrize(
    ("status", "headers", "raw", "kind", "words"),
    [
        *((code, {}, error(LENGTH), RequestError, f"({code}): {LENGTH}") for code in (400, 413, 422, 431)),
        *((code, {}, b"no", ModelError, f"fails ({code}): no") for code in (402, 405, 410, 415)),
        *(
            (code, {}, error(words), RequestError, f"rejects the request ({code}): {words}")
            for code in (500, 501)
            for words in ABOUT_THE_REQUEST
        ),
        (429, {}, error("over quota", code="insufficient_quota"), ModelError, "fails (429): over quota"),
        (404, {}, b'{"detail": "Nothing"}', ModelError, "has no /chat/completions (404: Nothing): check base_url"),
        (200, HTML, b"<html>Hi!</html>", ModelError, "replies with a web page: check base_url, which usually ends in"),
    ],
)
def test_a_permanent_failure_is_reported_without_a_retry(
    server: Any, remote: Any, fault: Any, status: int, headers: dict[str, str], raw: bytes, kind: Any, words: str
) -> None:
    server.always = fault(status, headers, raw=raw)
    with pytest.raises(kind) as caught:
        remote().generate([ask()])
    assert words in str(caught.value)
    assert len(server.posts) == 1


@pytest.mark.parametrize(
    ("status", "message"),
    [
        (404, {"error": {"message": "The model `tiny` does not exist.", "code": 404}}),
        (404, {"error": {"message": "no such thing", "code": "model_not_found"}}),
        (400, {"error": {"message": "no such thing", "code": "model_not_found"}}),
        (400, {"detail": "Server is pinned to '/models/big'; requested 'tiny'."}),
    ],
)
def test_an_unknown_model_error_lists_the_servers_models(
    server: Any, remote: Any, status: int, message: dict[str, Any]
) -> None:
    server.models = ["big", "bigger"]
    server.reply = lambda path, body: (status, message)
    with pytest.raises(ModelError, match=r"has no model 'tiny'.*Its models: big, bigger\. Give one of them"):
        remote().generate([ask()])


def test_a_servers_message_becomes_one_short_line_without_control_characters(server: Any, remote: Any) -> None:
    server.reply = lambda path, body: (400, {"error": {"message": "a\n\x1b[2Jb" + "x" * 5000}})
    with pytest.raises(RequestError) as caught:
        remote().generate([ask()])
    message = str(caught.value).partition("(400): ")[2]
    assert message.startswith("a [2Jbxxx")
    assert len(message) == 200


@pytest.mark.parametrize("status", [301, 302, 303])
def test_a_redirect_that_loses_the_prompt_is_reported_with_its_address(
    server: Any, remote: Any, fault: Any, status: int
) -> None:
    server.always = fault(status, {"location": f"{server.url}/models?token=hidden"}, raw=b"")
    with pytest.raises(ModelError, match=rf"it redirects to {server.url}/models; set base_url to that address"):
        remote().generate([ask()])
    assert len([asked for asked in server.asked if asked.body]) == 1


# -- replies to the clients of a proxy ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "headers", "status", "wait"),
    [
        (429, {"Retry-After": "300"}, 429, 300),
        (429, {"Retry-After": formatdate(time.time() + 10_000, usegmt=True)}, 429, 10_000),
        (503, {"Retry-After-Ms": "500"}, 503, 1),
        (529, {}, 503, None),
        (504, {}, 504, None),
        (502, {}, 502, None),
        (402, {}, 502, None),
        (401, {}, 502, None),
    ],
)
def test_an_error_has_the_status_and_the_message_for_clients_of_a_proxy(
    server: Any, remote: Any, fault: Any, given: int, headers: dict[str, str], status: int, wait: int | None
) -> None:
    server.always = fault(given, headers, raw=error("busy"))
    with pytest.raises(ServerError) as caught:
        remote(retries=0).generate([ask()])
    assert caught.value.status == status
    assert caught.value.retry_after == (wait if wait is None else pytest.approx(wait, rel=0.5))
    assert caught.value.said == ("" if given == 401 else "busy")


def test_a_dropped_connection_and_a_slow_server_have_statuses(server: Any, remote: Any, fault: Any) -> None:
    server.faults += [fault(reset=True), fault(delay=9)]
    for status in (502, 504):
        with pytest.raises(ServerError) as caught:
            remote(retries=0, timeout=0.5).generate([ask()])
        assert (caught.value.status, caught.value.said) == (status, "")


@pytest.mark.parametrize(
    ("given", "message", "status", "code"),
    [
        (500, "CUDA out of memory", 502, None),
        (500, "System role not supported", 400, None),
        (400, "maximum context length is 100 tokens", 400, "context_length_exceeded"),
        (400, "the request exceeds the available context size", 400, "context_length_exceeded"),
        (400, "bad stop", 400, None),
    ],
)
def test_a_refusal_has_a_status_and_a_code(
    server: Any, remote: Any, fault: Any, given: int, message: str, status: int, code: str | None
) -> None:
    server.always = fault(given, raw=error(message))
    with pytest.raises(RefusedError) as caught:
        remote(retries=0).generate([ask()])
    assert (caught.value.status, caught.value.code) == (status, code)
    assert caught.value.said == (f"{given}: {message}" if status == 502 else message)
