"""Formats of replies and tools, over both protocols, by the random model and OpenAI's client."""

from __future__ import annotations

import json
from typing import Any, Literal

import openai
import pytest
from pydantic import BaseModel, Field

from tot.decoders import Function, Message, Request, Sampling, load_decoder

TEMPLATE = (
    "{% if tools %}{% for t in tools %}{{ t.function.name }} {% endfor %}{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}{% for c in m.tool_calls %}\n<tool_call>\n"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}\n</tool_call>{% endfor %}'
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
HOT = {"temperature": 1.0, "seed": 3}
HEAD = '<tool_call>\n{"name": "weather", "arguments": '


class Weather(BaseModel):
    """Return the weather."""

    city: str = Field(max_length=5)
    unit: Literal["C", "F"]


class Verdict(BaseModel):
    sure: bool
    digit: int = Field(ge=0, le=9)


TOOL = openai.pydantic_function_tool(Weather, name="weather")
NOW = {"type": "function", "function": {"name": "now"}}
OF_RESPONSES = {"type": "function", **TOOL["function"]}
CALL = {"id": "c1", "type": "function", "function": {"name": "now", "arguments": "{}"}}
HM = {"role": "user", "content": "Hm."}
CALLED = {"role": "assistant", "content": None, "tool_calls": [CALL]}
RESULT = {"role": "tool", "tool_call_id": "c1", "content": "5"}
SCHEMA = {"type": "json_schema", "json_schema": {"name": "v", "schema": Verdict.model_json_schema(), "strict": False}}


@pytest.fixture
def tools(server: Any, use: Any, client: openai.OpenAI) -> openai.OpenAI:
    """A client of a server whose chat template has tools."""
    use(server, TEMPLATE)
    return client


def test_a_reply_has_the_form_of_a_schema(client: openai.OpenAI) -> None:
    about = {"model": "tiny", "messages": [HM], "max_tokens": 100, **HOT}
    parsed = client.chat.completions.parse(response_format=Verdict, **about)
    text = parsed.choices[0].message.content
    assert parsed.choices[0].message.parsed == Verdict.model_validate_json(text)
    assert parsed.choices[0].finish_reason == "stop"
    reply = client.chat.completions.create(response_format=SCHEMA, logprobs=True, **about)
    assert reply.choices[0].message.content == text  # strict or not
    entries = reply.choices[0].logprobs.content
    assert "".join(entry.token for entry in entries).startswith(text)
    assert all(entry.logprob < 0 for entry in entries)
    chunks = client.chat.completions.create(response_format=SCHEMA, stream=True, **about)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == text
    whole = client.chat.completions.create(response_format={"type": "json_object"}, **about | {"max_tokens": 290})
    assert whole.choices[0].message.content.startswith("{")
    plain = client.chat.completions.create(response_format={"type": "text"}, **about)
    assert plain.choices[0].message.content == client.chat.completions.create(**about).choices[0].message.content


def test_a_response_has_the_form_of_a_schema(client: openai.OpenAI) -> None:
    about: dict[str, Any] = {"model": "tiny", "input": "Hm.", "temperature": 1.0, "extra_body": {"seed": 3}}
    reply = client.responses.parse(text_format=Verdict, max_output_tokens=100, **about)
    assert reply.output_parsed == Verdict.model_validate_json(reply.output_text)
    with client.responses.stream(text_format=Verdict, max_output_tokens=100, **about) as stream:
        assert stream.get_final_response().output_parsed == reply.output_parsed


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}])
def test_a_chat_has_a_call_whole_and_streamed(tools: openai.OpenAI, choice: Any) -> None:
    about = {"model": "tiny", "messages": [HM], "tools": [TOOL], "tool_choice": choice, "max_tokens": 200, **HOT}
    about["parallel_tool_calls"] = False
    whole = tools.chat.completions.parse(**about).choices[0]
    assert (whole.finish_reason, whole.message.content) == ("tool_calls", None)
    (call,) = whole.message.tool_calls
    assert call.function.parsed_arguments == Weather.model_validate_json(call.function.arguments)
    chunks = [chunk.choices[0] for chunk in tools.chat.completions.create(stream=True, **about)]
    deltas = [delta for chunk in chunks for delta in chunk.delta.tool_calls or ()]
    first, *rest = deltas
    assert (first.index, first.type, first.function.name, first.function.arguments) == (0, "function", "weather", "")
    assert first.id.startswith("call_")
    assert len(rest) > 3
    assert all((delta.index, delta.id, delta.function.name) == (0, None, None) for delta in rest)
    assert "".join(delta.function.arguments for delta in rest) == call.function.arguments
    assert [chunk.finish_reason for chunk in chunks if chunk.finish_reason] == ["tool_calls"]
    assert not any(chunk.delta.content for chunk in chunks)


def test_a_response_has_calls_whole_and_streamed(tools: openai.OpenAI) -> None:
    about: dict[str, Any] = {"model": "tiny", "temperature": 1.0, "max_output_tokens": 200, "extra_body": {"seed": 3}}
    about |= {"tools": [OF_RESPONSES], "tool_choice": {"type": "function", "name": "weather"}}
    reply = tools.responses.create(input="Hm.", **about)
    (call,) = reply.output
    assert (call.type, call.name, call.status, reply.status) == ("function_call", "weather", "completed", "completed")
    assert Weather.model_validate_json(call.arguments)
    assert (reply.tools[0].name, reply.tool_choice.name, reply.parallel_tool_calls) == ("weather", "weather", True)
    with tools.responses.stream(input="Hm.", **about) as stream:
        events = list(stream)
        final = stream.get_final_response()
    assert final.output[0].arguments == call.arguments
    kinds = [event.type for event in events]
    of_call = "response.function_call_arguments"
    assert kinds[2] == "response.output_item.added"
    assert kinds.count(f"{of_call}.delta") > 3
    assert kinds[-3:] == [f"{of_call}.done", "response.output_item.done", "response.completed"]
    assert len({event.item_id for event in events if event.type.startswith(of_call)} | {call.id}) == 2
    back = [{**HM}, call, {"type": "function_call_output", "call_id": call.call_id, "output": "5"}]
    assert tools.responses.create(input=back, **about | {"tool_choice": "none"}).output[0].type == "message"


def test_several_calls_have_indices_and_an_answer_may_come_instead(tools: openai.OpenAI) -> None:
    about = {"model": "tiny", "messages": [HM], "tools": [NOW], "max_tokens": 300, "temperature": 1.0}
    for seed in range(20):
        reply = tools.chat.completions.create(tool_choice="required", seed=seed, **about).choices[0]
        if len(reply.message.tool_calls) > 1:
            break
    names = [call.function.name for call in reply.message.tool_calls]
    assert names == ["now"] * len(names)
    assert len({call.id for call in reply.message.tool_calls}) == len(names) > 1
    chunks = tools.chat.completions.create(tool_choice="required", seed=seed, stream=True, **about)
    starts = [delta for chunk in chunks for delta in chunk.choices[0].delta.tool_calls or () if delta.id]
    assert [delta.index for delta in starts] == [*range(len(names))]
    auto = tools.chat.completions.create(seed=1, **about | {"max_tokens": 30}).choices[0]
    none = tools.chat.completions.create(seed=1, tool_choice="none", **about | {"max_tokens": 30}).choices[0]
    plain = tools.chat.completions.create(model="tiny", messages=[HM], seed=1, temperature=1.0, max_tokens=30)
    assert (auto.message.tool_calls, len(auto.message.content) > 5) == (None, True)
    assert none.message.content == plain.choices[0].message.content


def test_a_cut_call_says_so(tools: openai.OpenAI) -> None:
    about = {"model": "tiny", "messages": [HM], "tools": [TOOL], "tool_choice": "required", "max_tokens": 50, **HOT}
    reply = tools.chat.completions.create(**about).choices[0]
    assert (reply.finish_reason, reply.message.tool_calls) == ("length", None)
    assert reply.message.content.startswith(HEAD)
    chunks = [chunk.choices[0] for chunk in tools.chat.completions.create(stream=True, **about)]
    pieces = [delta.function.arguments for chunk in chunks for delta in chunk.delta.tool_calls or ()]
    assert HEAD + "".join(pieces) == reply.message.content
    assert chunks[-1].finish_reason == "length"
    of_responses = {"tools": [OF_RESPONSES], "max_output_tokens": 50, "temperature": 1.0, "extra_body": {"seed": 3}}
    response = tools.responses.create(model="tiny", input="Hm.", tool_choice="required", **of_responses)
    (item,) = response.output
    assert (item.type, item.status, response.status) == ("message", "incomplete", "incomplete")
    assert response.output_text == reply.message.content


def test_a_stop_string_may_cut_a_call(tools: openai.OpenAI, server: Any) -> None:
    about = {"model": "tiny", "messages": [HM], "tools": [TOOL], "tool_choice": "required", "max_tokens": 200, **HOT}
    stop = ', "unit'
    reply = tools.chat.completions.create(stop=stop, **about).choices[0]
    assert (reply.finish_reason, reply.message.tool_calls) == ("stop", None)
    assert reply.message.content.startswith(HEAD)
    assert stop not in reply.message.content
    chunks = [chunk.choices[0] for chunk in tools.chat.completions.create(stop=stop, stream=True, **about)]
    assert chunks[-1].finish_reason == "stop"
    tool = {"name": "weather", "input_schema": TOOL["function"]["parameters"]}
    given = {"tool_choice": {"type": "any"}, "tools": [tool], "stop_sequences": [stop]}
    message = server.post("/v1/messages", **about | given).json()
    assert (message["stop_reason"], message["stop_sequence"]) == ("stop_sequence", stop)
    assert [block["type"] for block in message["content"]] == ["text"]


def test_a_call_before_a_cut_one_is_reported(tools: openai.OpenAI) -> None:
    about = {"model": "tiny", "messages": [HM], "tools": [NOW], "tool_choice": "required", **HOT}
    for seed in range(20):
        calls = tools.chat.completions.create(**about | {"max_tokens": 300, "seed": seed}).choices[0].message.tool_calls
        if len(calls) > 1:
            break
    stop = '</tool_call>\n<tool_call>\n{"na'
    reply = tools.chat.completions.create(**about | {"max_tokens": 300, "seed": seed, "stop": stop}).choices[0]
    assert (reply.finish_reason, len(reply.message.tool_calls)) == ("tool_calls", 1)
    assert json.loads(reply.message.tool_calls[0].function.arguments) == {}


def test_calls_of_a_server_equal_the_local_decoders(tools: openai.OpenAI, server: Any) -> None:
    function = Function(name="weather", description="Return it.", parameters=TOOL["function"]["parameters"])
    sampling = Sampling(max_tokens=250, temperature=1.0, n=3, seed=5)
    asked = Request(
        prompt=(Message(role="user", content="Hm."),), tools=(function, Function(name="now")), tool_choice="required"
    ).model_copy(update={"sampling": sampling})
    with load_decoder("openai", "tiny", base_url=f"{server.url}/v1") as remote:
        assert remote.server.title == "tot serve"
        for _ in range(2):
            read = [
                [decoder.read_calls(one) for one in decoder.generate([asked])] for decoder in (server.decoder, remote)
            ]
            here, there = [[(text, [(c.name, c.arguments) for c in calls]) for text, calls in each] for each in read]
            assert here == there
            assert any(calls for _, calls in here)
            text, calls = next(one for one in read[1] if one[1])
            results = [Message(role="tool", content="5", tool_call_id=call.id) for call in calls]
            called = Message(role="assistant", content=text, tool_calls=tuple(calls))
            asked = asked.model_copy(update={"prompt": (*asked.prompt, called, *results)})


def test_a_call_follows_thinking(server: Any, use: Any, client: openai.OpenAI) -> None:
    use(server, TEMPLATE.replace("assistant\n{% endif %}", "assistant\n<think>\n{% endif %}"))
    about: dict[str, Any] = {"model": "tiny", "messages": [HM], "tools": [TOOL], "tool_choice": "required", **HOT}
    about |= {"parallel_tool_calls": False, "max_tokens": 200, "extra_body": {"thinking_budget": 20}}
    whole = client.chat.completions.create(**about).choices[0]
    assert (whole.finish_reason, len(whole.message.reasoning_content) > 5) == ("tool_calls", True)
    deltas = [chunk.choices[0].delta for chunk in client.chat.completions.create(stream=True, **about)]
    thinking = "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas)
    assert thinking == whole.message.reasoning_content
    pieces = [call.function.arguments for delta in deltas for call in delta.tool_calls or ()]
    assert "".join(pieces) == whole.message.tool_calls[0].function.arguments


def test_results_are_part_of_the_prompt(tools: openai.OpenAI, server: Any) -> None:
    def tokens(*messages: Any) -> int:
        body = {"model": "tiny", "max_tokens": 1, "messages": [HM, *messages]}
        return int(server.post(**body).json()["usage"]["prompt_tokens"])

    one = tokens(CALLED, RESULT)
    assert one > tokens({"role": "assistant", "content": "x"}, HM)
    parts = [{"type": "text", "text": "5"}, {"type": "text", "text": "<|im_end|>"}]
    assert tokens(CALLED, {**RESULT, "content": parts}) == one + len("<|im_end|>")


F = {"type": "function", "function": {"name": "f"}}
BAD: list[tuple[dict[str, Any], str, str]] = [
    ({"response_format": {"type": "xml"}}, "response_format", 'the type is "text", "json_object" or "json_schema"'),
    ({"response_format": {"type": "json_schema"}}, "response_format", 'which has a "schema"'),
    ({"response_format": {"type": "json_schema", "schema": {"type": "no"}}}, "response_format", "Invalid type: no"),
    ({"response_format": SCHEMA, "constraint": {"regex": "a"}}, "response_format", "are both given: remove one"),
    ({"tools": [{"type": "web_search"}]}, "tools", "a tool has type 'web_search'"),
    ({"tools": [F | {"function": {"name": "<|im_end|>"}}]}, "tools.0.name", "String should match pattern"),
    ({"tools": [F | {"function": {"name": "f", "parameters": {"type": "no"}}}]}, "tools.0", "schema of an object"),
    (
        {"tools": [F, {"function": {"name": "g", "parameters": {"properties": {"a": {"type": "no"}}}}}]},
        "tools.1",
        "Invalid type: no",
    ),
    ({"tools": [F, F]}, "tools", "two tools are named f"),
    ({"tools": [F], "tool_choice": "f"}, "tool_choice", 'give "none", "auto", "required"'),
    ({"tools": [F], "tool_choice": {"type": "function"}}, "tool_choice", "valid string"),
    ({"tools": [F], "tool_choice": NOW}, "tool_choice", "tool_choice is 'now', and the tools are f"),
    ({"tool_choice": "required"}, "tool_choice", "the tools are missing"),
    ({"messages": [HM, RESULT]}, "messages.1.tool_call_id", "no call before this result has the id 'c1'"),
    ({"messages": [HM, CALLED, {**RESULT, "content": {"a": 1}}]}, "messages.2.content", "valid string"),
    ({"messages": [HM, CALLED, {"role": "tool", "content": "5"}]}, "messages.2.tool_call_id", "the id ''"),
    ({"messages": [HM, CALLED]}, "messages", "calls without results"),
    ({"messages": [{**CALLED, "role": "user", "content": "a"}, HM]}, "messages.0.tool_calls", "only the assistant"),
    (
        {"messages": [HM, {**CALLED, "tool_calls": [{**CALL, "function": {"name": "f", "arguments": "{"}}]}, RESULT]},
        "messages.1.tool_calls",
        "the arguments of 'f' are not a JSON object ('{')",
    ),
    ({"messages": [HM, {**CALLED, "tool_calls": [{"id": "c1"}]}, RESULT]}, "messages.1.tool_calls", "a call must be"),
    ({"model": "tiny:pdos", "tools": [F]}, "tools", "does not support parallel steps"),
    ({"model": "tiny:pdos", "response_format": SCHEMA}, "response_format", "does not support parallel steps"),
]


@pytest.mark.parametrize(("fields", "param", "message"), BAD)
def test_impossible_formats_and_tools_are_refused_by_name(
    server: Any, use: Any, fields: dict[str, Any], param: str, message: str
) -> None:
    use(server, TEMPLATE)
    for stream in (False, True):
        body = {"model": "tiny", "messages": [HM], "max_tokens": 5, "stream": stream, **fields}
        reply = server.post(**body)
        error = reply.json()["error"]
        assert (reply.status_code, error["param"]) == (400, param)
        assert message in error["message"]


def test_many_tools_work(server: Any, use: Any) -> None:
    use(server, TEMPLATE.replace("{% for t in tools %}{{ t.function.name }} {% endfor %}", "{{ tools | length }}"))
    tools = [{"type": "function", "function": {**TOOL["function"], "name": f"f{i}"}} for i in range(200)]
    body = {"model": "tiny", "messages": [HM], "tools": tools, "tool_choice": "required", "max_tokens": 250}
    reply = server.post(**body, parallel_tool_calls=False, **HOT).json()
    assert reply["choices"][0]["message"]["tool_calls"][0]["function"]["name"] in {f"f{i}" for i in range(200)}
