"""Anthropic's Messages API: the same texts, thinking and calls as Chat Completions, in its own form."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.decoders.serving.test_tools import TEMPLATE

PATH = "/v1/messages"
HM = [{"role": "user", "content": "Hm."}]
HOT = {"temperature": 1.0, "seed": 3}
WEATHER = {
    "name": "weather",
    "description": "Return the weather.",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 5}},
        "required": ["city"],
    },
}
USE = {"type": "tool_use", "id": "c1", "name": "weather", "input": {"city": "Rome"}}
RESULT = {"type": "tool_result", "tool_use_id": "c1", "content": [{"type": "text", "text": "20 C"}]}


def ask(server: Any, path: str = PATH, **body: Any) -> dict[str, Any]:
    fields = {"model": "tiny", "messages": HM, "max_tokens": 30, **HOT, **body}
    reply = server.post(path, **fields)
    assert reply.status_code == 200, reply.text
    return dict(reply.json())


def events(server: Any, **body: Any) -> list[dict[str, Any]]:
    fields = {"model": "tiny", "messages": HM, "max_tokens": 30, "stream": True, **HOT, **body}
    blocks = [block.split("\n") for block in server.post(PATH, **fields).text.strip().split("\n\n")]
    data = [json.loads(line.removeprefix("data: ")) for _, line in blocks]
    assert [line for line, _ in blocks] == [f"event: {one['type']}" for one in data]
    return data


def joined(found: list[dict[str, Any]], index: int, field: str) -> str:
    deltas = [one["delta"] for one in found if one["type"] == "content_block_delta" and one["index"] == index]
    return "".join(delta[field] for delta in deltas)


def test_a_text_is_the_text_of_a_chat(server: Any) -> None:
    blocks = [{"type": "text", "text": "Be", "cache_control": {"type": "ephemeral"}}]
    reply = ask(server, system=blocks, metadata={"user_id": "u"}, stop_sequences=["qq"])
    messages = [{"role": "system", "content": "Be"}, *HM]
    chat = ask(server, "/v1/chat/completions", messages=messages, stop=["qq"])
    assert reply["content"] == [{"type": "text", "text": chat["choices"][0]["message"]["content"]}]
    assert (reply["type"], reply["role"], reply["stop_reason"]) == ("message", "assistant", "max_tokens")
    assert reply["usage"]["output_tokens"] == 30
    prompt = reply["usage"]["input_tokens"] + reply["usage"]["cache_read_input_tokens"]
    assert prompt == chat["usage"]["prompt_tokens"]
    assert ask(server, f"{PATH}/count_tokens", system="Be")["input_tokens"] == prompt
    text = reply["content"][0]["text"]
    stopped = ask(server, system="Be", stop_sequences=[text[3]])
    assert (stopped["stop_reason"], stopped["stop_sequence"]) == ("stop_sequence", text[3])
    assert stopped["content"][0]["text"] == text[: text.index(text[3])]
    assert ask(server, max_tokens=10**6)["usage"]["output_tokens"] <= 300


def test_a_stream_has_the_blocks_of_the_whole(server: Any, use: Any) -> None:
    use(server, TEMPLATE.replace("assistant\n{% endif %}", "assistant\n<think>\n{% endif %}"))
    thinking = {"type": "enabled", "budget_tokens": 20}
    whole = ask(server, thinking=thinking, max_tokens=60)
    assert [block["type"] for block in whole["content"]] == ["thinking", "text"]
    found = events(server, thinking=thinking, max_tokens=60)
    assert joined(found, 0, "thinking") == whole["content"][0]["thinking"]
    assert joined(found, 1, "text") == whole["content"][1]["text"]
    kinds = [one["type"] for one in found if one["type"] != "content_block_delta"]
    block = ["content_block_start", "content_block_stop"]
    assert kinds == ["message_start", *block, *block, "message_delta", "message_stop"]
    assert found[-2]["delta"]["stop_reason"] == whole["stop_reason"] == "max_tokens"
    assert found[-2]["usage"]["output_tokens"] == whole["usage"]["output_tokens"] == 60
    back = [*HM, {"role": "assistant", "content": whole["content"]}, *HM]
    assert ask(server, messages=back)["content"]


def test_calls_and_their_results_go_back_and_forth(server: Any, use: Any) -> None:
    use(server, TEMPLATE)
    choice = {"type": "tool", "name": "weather"}
    whole = ask(server, tools=[WEATHER], tool_choice=choice, max_tokens=200)
    (call,) = whole["content"]
    assert (call["type"], call["name"], set(call["input"]), whole["stop_reason"]) == (
        *("tool_use", "weather"),
        {"city"},
        "tool_use",
    )
    found = events(server, tools=[WEATHER], tool_choice=choice, max_tokens=200)
    assert json.loads(joined(found, 0, "partial_json")) == call["input"]
    assert found[-2]["delta"]["stop_reason"] == "tool_use"
    one = {"type": "any", "disable_parallel_tool_use": True}
    assert len(ask(server, tools=[WEATHER], tool_choice=one, max_tokens=200)["content"]) == 1
    cut = ask(server, tools=[WEATHER], tool_choice=one, max_tokens=60)
    assert (cut["stop_reason"], [block["type"] for block in cut["content"]]) == ("max_tokens", ["text"])
    result = {"role": "user", "content": [RESULT, {"type": "text", "text": "So?"}]}
    turns = [*HM, {"role": "assistant", "content": [{"type": "text", "text": "Well."}, USE]}, result]
    function = {"name": "weather", "arguments": '{"city": "Rome"}'}
    calls = [{"id": "c1", "type": "function", "function": function}]
    called = {"role": "assistant", "content": "Well.", "tool_calls": calls}
    chat = [*HM, called, {"role": "tool", "tool_call_id": "c1", "content": "20 C"}, {"role": "user", "content": "So?"}]
    expected = ask(server, "/v1/chat/completions", messages=chat)["choices"][0]["message"]["content"]
    assert ask(server, messages=turns)["content"][0]["text"] == expected


def test_a_reply_has_the_form_of_a_schema(server: Any) -> None:
    form = {"format": {"type": "json_schema", "schema": {"type": "boolean"}}}
    assert ask(server, output_config=form)["content"][0]["text"] in ("true", "false")


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"max_tokens": None}, "max_tokens", "max_tokens is missing"),
        ({"messages": "Hm."}, "messages", "valid array"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages.0.content", "type 'image'"),
        ({"messages": [{"role": "user", "content": [RESULT]}]}, "messages.0.tool_call_id", "has the id 'c1'"),
        ({"messages": [*HM, {"role": "assistant", "content": [USE]}]}, "messages", "calls without results"),
        ({"messages": [*HM, {"role": "assistant", "content": [{**USE, "input": 5}]}]}, "messages.1.tool_calls", "'5'"),
        ({"tools": [{"type": "web_search_20250305"}]}, "tools", "a tool has type 'web_search_20250305'"),
        ({"tools": [WEATHER], "tool_choice": {"type": "tool", "name": "x"}}, "tool_choice", "tool_choice is 'x'"),
        ({"tools": [WEATHER], "tool_choice": {"type": "some"}}, "tool_choice", "give"),
        ({"output_config": {"format": {"type": "xml"}}}, "output_config.format", "the type is"),
        ({"mcp_servers": [{}]}, "mcp_servers", "mcp_servers is not supported"),
        ({"top_p": 2}, "top_p", "less than or equal to 1"),
        ({"system": 5}, "system", "valid string"),
        ({"system": [{"type": "image"}]}, "system", "type 'image'"),
    ],
)
def test_bad_messages_are_refused_by_name(server: Any, fields: dict[str, Any], param: str, message: str) -> None:
    body = {"model": "tiny", "messages": HM, "max_tokens": 5, **fields}
    reply = server.post(PATH, **body)
    assert reply.json()["type"] == "error"
    error = reply.json()["error"]
    assert (reply.status_code, error["param"], error["type"]) == (400, param, "invalid_request_error")
    assert message in error["message"]


def test_the_key_may_be_in_anthropics_header(serve: Any) -> None:
    server = serve(key="right")
    body = {"model": "tiny", "messages": HM, "max_tokens": 5}
    head = {"content-type": "application/json"}
    for key, status in (("right", 200), ("wrong", 401)):
        reply = server.post(PATH, content=json.dumps(body).encode(), headers={**head, "x-api-key": key})
        assert reply.status_code == status
