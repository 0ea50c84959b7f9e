"""Servers that cannot be reached, and faults of many requests at once."""

from __future__ import annotations

import socket
from typing import Any

import pytest

from tot.decoders import Message, ModelError, Request, RequestError, Sampling, load_decoder

PASSING = [408, 409, 429, 500, 502, 503, 504, 529]


def ask(text: str = "q", **sampling: Any) -> Request:
    return Request(prompt=(Message(role="user", content=text),), sampling=Sampling(**sampling))


def text_of(server: Any) -> str:
    """Return the server's reply to its last received body."""
    return server.hashed("", server.posts[-1].body)[0]["text"]


def faults_of(fault: Any) -> dict[str, Any]:
    return {
        "reset": fault(reset=True),
        "truncated body": fault(keep=0.6),
        "no body": fault(keep=0.0),
        "malformed JSON": fault(raw=b'{"choices": [{"mess'),
        "empty body": fault(raw=b""),
        "JSON of another shape": fault(raw=b'{"choices": "none"}'),
        "no choices": fault(raw=b'{"choices": []}'),
        "null": fault(raw=b"null"),
        "bytes": fault(raw=b"\xff\xfe\x00", headers={"content-type": "application/octet-stream"}),
        "plain text": fault(raw=b"upstream died", headers={"content-type": "text/plain"}),
        "broken off": fault(raw=b'{"choices": [{"message": {"content": "ha"}, "finish_reason": "abort"}]}'),
        "neither message nor text": fault(raw=b'{"choices": [{"index": 0, "finish_reason": "stop"}]}'),
        "message of null": fault(raw=b'{"choices": [{"message": null, "finish_reason": "stop"}]}'),
        "content of another shape": fault(raw=b'{"choices": [{"message": {"content": {"text": "a"}}}]}'),
        "content with an image": fault(raw=b'{"choices": [{"message": {"content": [{"type": "image_url"}]}}]}'),
        "error with status 200": fault(raw=b'{"error": {"message": "Too many requests"}}'),
        "error with choices of null": fault(raw=b'{"choices": null, "detail": "no capacity"}'),
    }


def test_a_refused_connection_is_reported_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
        with pytest.raises(ModelError, match=rf"server at http://127\.0\.0\.1:{port}/v1 does not answer .*: start it"):
            load_decoder("openai", "tiny", base_url=f"http://127.0.0.1:{port}/v1")


def test_a_host_without_an_address_is_reported_at_once() -> None:
    with pytest.raises(ModelError, match=r"no-such-host\.invalid/v1 does not answer"):
        load_decoder("openai", "tiny", base_url="http://no-such-host.invalid/v1")


@pytest.mark.parametrize("has_key", [True, False])
def test_a_wrong_key_is_reported_before_any_request(
    server: Any, remote: Any, monkeypatch: pytest.MonkeyPatch, has_key: bool
) -> None:
    if not has_key:
        monkeypatch.delenv("OPENAI_API_KEY")
    server.models_status = 401
    refused = "the key in OPENAI_API_KEY$" if has_key else "a request without a key: set OPENAI_API_KEY$"
    with pytest.raises(ModelError, match=rf"rejects \(401\) {refused}"):
        remote()
    assert server.posts == []


@pytest.mark.parametrize("status", [404, 405, 500])
def test_a_server_without_a_list_of_models_is_used_anyway(server: Any, remote: Any, status: int) -> None:
    server.models_status = status
    (completion,) = remote().generate([ask()])
    assert completion.text == text_of(server)


# -- many at once -------------------------------------------------------------------------------------------------


def test_with_all_faults_at_once_no_reply_is_lost_or_doubled(server: Any, remote: Any, fault: Any) -> None:
    kinds = [*faults_of(fault).values(), *(fault(status) for status in PASSING), fault(429, {"retry-after": "0.01"})]
    server.faults += kinds * 4
    decoder = remote(retries=100, concurrency=16)
    requests = [ask(f"q{i}", temperature=1, n=2, seed=i) for i in range(60)]
    done = decoder.generate(requests)
    bodies = {asked.body["messages"][0]["content"]: asked.body for asked in server.posts}
    expected = [reply["text"] for i in range(60) for reply in server.hashed("", bodies[f"q{i}"])]
    assert [one.text for one in done] == expected
    assert len(set(expected)) == 120
    assert decoder.spent.retries == len(kinds) * 4
    assert len(server.posts) == 60 + len(kinds) * 4
    assert (decoder.spent.requests, decoder.spent.usage.new_tokens) == (60, 360)


def test_an_outage_is_logged_once_not_once_per_request(server: Any, remote: Any, fault: Any, caplog: Any) -> None:
    server.faults += [fault(503, raw=b'{"error": "restarting"}')] * 10
    remote().generate([ask(f"q{i}") for i in range(10)])
    messages = [record.message for record in caplog.records if "retrying" in record.message]
    assert messages == [f"{server.url}: 503: restarting; retrying up to 10 times"]


def test_an_outage_is_logged_once_even_if_a_failure_follows_a_good_reply(
    server: Any, remote: Any, fault: Any, caplog: Any
) -> None:
    server.wait_for = 2
    server.faults += [fault(503, raw=b"{}"), fault(503, raw=b"{}", delay=0.5)]
    decoder = remote()
    decoder.generate([ask("q0"), ask("q1")])
    assert (decoder.spent.retries, caplog.text.count("retrying")) == (2, 1)
    server.faults += [fault(503, raw=b"{}")]  # the next outage
    decoder.generate([ask("q2")])
    assert (decoder.spent.retries, caplog.text.count("retrying")) == (3, 2)


def test_one_refused_request_ends_the_call_and_drops_the_others(server: Any, remote: Any, fault: Any) -> None:
    def reply(path: str, body: dict[str, Any]) -> Any:
        return (400, {"error": "too long"}) if body["messages"][0]["content"] == "q3" else server.hashed(path, body)

    server.reply = reply
    server.wait_for = 5
    with pytest.raises(RequestError, match="too long"):
        remote().generate([ask(f"q{i}") for i in range(5)])
    (completion,) = remote().generate([ask("q9")])
    assert completion.text == text_of(server)
