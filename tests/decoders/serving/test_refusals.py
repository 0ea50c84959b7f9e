"""Impossible requests are refused with OpenAI's error format, the field's name and the client's typed exceptions."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx2 as httpx
import openai
import pytest

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
HM = [{"role": "user", "content": "Hm."}]


def check(reply: httpx.Response, status: int, message: str, param: str | None = None) -> dict[str, Any]:
    """Check that a reply is an error in OpenAI's format, and return the error."""
    assert reply.headers["content-type"] == "application/json"
    body = reply.json()
    assert set(body) == {"error"}
    error: dict[str, Any] = body["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert (reply.status_code, error["param"]) == (status, param)
    assert message in error["message"]
    assert "\n" not in error["message"]
    assert len(error["message"]) <= 400
    return error


def bodies(**field: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    for path, body in ((CHAT, {"messages": HM}), (TEXT, {"prompt": "Hm."})):
        yield path, {"model": "tiny", **body, **field}


def test_fields_that_would_change_the_result_are_refused_by_name(server: Any) -> None:
    for field, value in (
        ("functions", [{"name": "f"}]),
        ("logit_bias", {"50": 10}),
        ("frequency_penalty", 0.5),
        ("repetition_penalty", 1.1),
        ("best_of", 3),
        ("guided_choice", ["a", "b"]),
        ("modalities", ["audio"]),
        ("web_search_options", {}),
        ("steps", ["One"]),
        ("sampling", {}),
        ("a\nstrange <field>" * 20, 1),
    ):
        for path, body in bodies(**{field: value}):
            error = check(server.post(path, **body), 400, " ".join(field[:60].split()), field[:60])
            assert error["code"] == "unsupported_parameter"


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("n", 0, "n: Input should be greater than or equal to 1 (it is 0)"),
        ("n", 129, "129 samples (prompts times n) exceed the limit of 128"),
        ("n", "2", "n: Input should be a valid integer (it is '2')"),
        ("temperature", -0.1, "temperature: Input should be greater than or equal to 0 (it is -0.1)"),
        ("temperature", "hot", "temperature: Input should be a valid number"),
        ("top_p", 0, "top_p: Input should be greater than 0 (it is 0)"),
        ("top_k", -2, "top_k"),
        ("min_p", 2, "min_p"),
        ("seed", -(2**63) - 1, "seed"),
        ("seed", 2**64, "seed"),
        ("seed", 0.5, "seed"),
        ("reasoning_effort", "banana", "reasoning_effort: Input should be 'none', 'minimal', 'low'"),
        ("stop", [""], "stop.0"),
        ("stop", ["x"] * 17, "stop"),
        ("stop", "x" * 201, "stop.0"),
        ("max_tokens", 301, "max_tokens is 301 and this server's limit is 300: request fewer"),
        ("max_tokens", -1, "max_tokens"),
        ("stream", "yes", "stream"),
        ("close_choices", True, "close_choices needs choices"),
        ("drawn", -1, "drawn: Input should be greater than or equal to 0"),
        ("choices", ["x"] * 129, "choices: List should have at most 128 items"),
    ],
)
def test_invalid_values_are_refused_and_quoted(server: Any, field: str, value: Any, message: str) -> None:
    for path, body in bodies(**{field: value}):
        param = {"stop": message, "close_choices": None}.get(field, field)
        check(server.post(path, **body), 400, message, param)


@pytest.mark.parametrize(
    ("messages", "message", "param"),
    [
        ([], "messages: List should have at least 1 item", "messages"),
        ("Hm.", "messages: Input should be a valid array (it is 'Hm.')", "messages"),
        ([{"role": "user"}], "messages.0.content is missing", "messages.0.content"),
        ([{"role": "function", "content": "5"}], "use tools, and the role 'tool'", "messages.0.role"),
        ([{"role": "poet", "content": "5"}], "messages.0.role", "messages.0.role"),
        ([{"role": "user", "content": None}], "messages.0.content is missing", "messages.0.content"),
        (
            [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
            "a part has type 'image_url', and only text is supported",
            "messages.0.content",
        ),
        ([{"role": "user", "content": [{"type": "text"}]}], "a text part must be", "messages.0.content"),
    ],
)
def test_unreadable_messages_are_refused(server: Any, messages: Any, message: str, param: str | None) -> None:
    error = check(server.post(CHAT, model="tiny", messages=messages), 400, message, param)
    assert error["type"] == "invalid_request_error"


def test_unreadable_prompts_are_refused(server: Any) -> None:
    for prompt, message in (
        ("", "the prompt is empty"),
        ([], "the prompt is empty"),
        (["a", ""], "the prompt is empty"),
        ([[]], "the prompt is empty"),
        ([1, 10**6], "token id 1000000 is outside the vocabulary of 259"),
        ([-1], "token id -1 is outside"),
        ([10**30], "token id 1000000000000000000000000000000 is outside"),
        (["a"] * 129, "129 samples"),
        ("x" * 600, "the prompt has 600 tokens, the model's context holds 512"),
    ):
        reply = server.post(TEXT, model="tiny", prompt=prompt)
        check(reply, 400, message, "n" if "samples" in message else None)


def test_a_request_larger_than_the_kv_budget_is_refused_with_the_numbers(serve: Any) -> None:
    server = serve(kv_budget=500)
    reply = server.post(TEXT, model="tiny", prompt="Hm.", n=4, max_tokens=200)
    assert check(reply, 400, "and the budget holds 500")["type"] == "invalid_request_error"


def test_invalid_bodies_are_refused(server: Any) -> None:
    for body in (
        *(b"", b"{", b"[]", b"null", b"3", b'"x"', b"\xff\xfe", b"[" * 100_000),
        b'{"model": "tiny", "prompt": "\\ud800"}',
        b'{"model": "tiny", "prompt": "x", "temperature": NaN}',
        b'{"model": "tiny", "prompt": "x", "top_p": 1e999}',
    ):
        reply = server.post(TEXT, content=body, headers={"content-type": "application/json"})
        assert check(reply, 400, "", reply.json()["error"]["param"])["type"] == "invalid_request_error"


def test_unknown_paths_and_methods_are_refused_in_the_same_format(server: Any) -> None:
    nowhere = check(httpx.get(f"{server.url}/v2/x"), 404, "/v2/x does not exist: the API is under /v1")
    assert (nowhere["type"], nowhere["code"]) == ("not_found_error", "not_found")
    wrong_way = check(httpx.get(f"{server.url}{CHAT}"), 405, f"{CHAT} does not support GET")
    assert (wrong_way["type"], wrong_way["code"]) == ("invalid_request_error", "method_not_allowed")
    unserved = check(server.post("/v1/embeddings"), 404, "/v1/embeddings does not exist")
    assert (unserved["type"], unserved["code"]) == ("not_found_error", "not_found")
    unknown = server.post(TEXT, model="line\nbreak " + "x" * 5000, prompt="x")
    assert check(unknown, 404, "unknown model 'line\\nbreak xxx", "model")["code"] == "model_not_found"


def test_openais_client_raises_its_own_exceptions(serve: Any) -> None:
    server = serve(key="right")
    with server.client(api_key="right") as client:
        for kind, options in ((openai.BadRequestError, {"n": 0}), (openai.NotFoundError, {"model": "gpt-x"})):
            with pytest.raises(kind) as refused:
                client.chat.completions.create(**{"model": "tiny", "messages": HM} | options)
            assert refused.value.body["message"] in str(refused.value)
        with pytest.raises(openai.BadRequestError) as streamed:
            client.chat.completions.create(model="tiny", messages=[*HM, *HM], stream=True, max_tokens=301)
        assert streamed.value.param == "max_tokens"
    refusing = pytest.raises(openai.AuthenticationError, match="this one is invalid")
    with server.client(api_key="wrong") as client, refusing:
        client.models.list()


def test_an_error_in_mid_stream_is_an_event(serve: Any) -> None:
    server = serve(grace=0)
    with server.client() as client:
        stream = client.completions.create(
            model="tiny", prompt="x", max_tokens=300, stream=True, extra_body={"ignore_eos": True}
        )
        next(stream)
        server.server.should_exit = True
        with pytest.raises(openai.APIError, match="the server is stopping"):
            list(stream)
