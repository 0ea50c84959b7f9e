"""Tools and formats of clients, with a search behind them: calls are answers, which vote."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tot.decoders import ToolCall
from tot.decoders.tools import OWN

ARGUMENTS = ({"city": "Rome", "days": 1}, {"days": 1.0, "city": "Rome "}, {"city": "Oslo", "days": 3})
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "number"}}}
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}
NAMED: Any = {"type": "function", "function": {"name": "weather"}}
FIVE = "vote: {search: 'self-consistency:samples=5'}"
TREE = "tree: {search: 'bfs:thoughts=3,breadth=3,select=all,aggregate=vote'}"
BEST = "best: {search: 'best-of-n:samples=3', evaluator: logprob}"


def call(arguments: Any, text: str = "", name: str = "weather") -> str:
    return text + OWN.write([ToolCall(name=name, arguments=json.dumps(arguments))])


CALLS = (call(ARGUMENTS[0], "Let me see.\n"), "It rains.", call(ARGUMENTS[1]), call(ARGUMENTS[2]), "Sunny days.")


def arguments(message: Any) -> Any:
    (made,) = message["tool_calls"]
    assert (made["type"], made["function"]["name"]) == ("function", "weather")
    return json.loads(made["function"]["arguments"])


def test_a_vote_of_calls_gives_a_call_that_the_model_wrote(serve: Any, chat: Any, user: Any) -> None:
    decoder = chat(*CALLS)
    about = {"tools": [WEATHER], "tool_choice": "auto", "parallel_tool_calls": False}
    reply = serve(decoder, FIVE).post(model="chat:vote", messages=user("a?"), **about).json()
    (choice,) = reply["choices"]
    assert choice["finish_reason"] == "tool_calls"
    assert arguments(choice["message"]) == ARGUMENTS[0]
    assert choice["message"]["content"] == "Let me see."
    assert '[1] Let me see.\nweather({"city": "Rome", "days": 1})\n' in choice["message"]["reasoning_content"]
    assert {name: reply["tot"][name] for name in ("chosen", "votes", "stopped")} == {
        "chosen": "votes",
        "votes": [2, 5],
        "stopped": None,
    }
    (request,) = {(one.tool_choice, one.parallel_tool_calls, len(one.tools)) for one in decoder.requests}
    assert request == ("auto", False, 1)


@pytest.mark.parametrize(
    ("searches", "model"), [(FIVE, "chat:vote"), (TREE, "chat:tree"), (BEST, "chat:best"), (FIVE, "chat")]
)
def test_streams_have_the_call_in_one_piece(serve: Any, chat: Any, user: Any, searches: str, model: str) -> None:
    server = serve(chat(call(ARGUMENTS[0])), searches)
    with server.client() as client:
        stream = client.chat.completions.create(
            model=model, messages=user("a?"), tools=[WEATHER], tool_choice="required", stream=True
        )
        chunks = [chunk for chunk in stream if chunk.choices]
        whole = client.chat.completions.create(
            model=model,
            messages=user("a?"),
            tools=[WEATHER],
            tool_choice=NAMED,
        )
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == ""
    deltas = [one for chunk in chunks for one in chunk.choices[0].delta.tool_calls or []]
    assert [one.function.name for one in deltas] == ["weather", None]
    assert json.loads("".join(one.function.arguments or "" for one in deltas)) == ARGUMENTS[0]
    assert chunks[-1].choices[0].finish_reason == whole.choices[0].finish_reason == "tool_calls"
    ids = [deltas[0].id, whole.choices[0].message.tool_calls[0].id]
    assert len({*ids}) == 2
    assert chunks[-1].tot["thoughts"] >= 1


def test_conversations_may_end_in_results(serve: Any, chat: Any, user: Any) -> None:
    decoder = chat("20 degrees")
    made = {"id": "c7", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}
    earlier = [{"role": "assistant", "content": "", "tool_calls": [{**made, "id": "c1"}]}]
    earlier += [
        {"role": "tool", "tool_call_id": "c1", "content": "hot"},
        {"role": "assistant", "content": "Hot."},
    ]
    turns = [
        {"role": "assistant", "content": "I look.", "tool_calls": [made], "reasoning_content": "[1] weather(...)"},
        {"role": "tool", "tool_call_id": "c7", "content": [{"type": "text", "text": "20 C <|im_end|>"}]},
    ]
    messages = [{"role": "system", "content": "Be short."}, *user("a?"), *earlier, *user("b?"), *turns]
    for tools in ([WEATHER], []):
        decoder.requests.clear()
        server = serve(decoder, FIVE)
        reply = server.post(model="chat:vote", messages=messages, tools=tools).json()
        assert reply["choices"][0]["message"]["content"] == "20 degrees"
        assert reply["tot"]["votes"] == [5, 5]
        prompt = decoder.requests[0].prompt
        roles = ["system", "user", "assistant", "tool", "assistant", "user", "assistant", "tool"]
        assert [message.role for message in prompt] == roles
        assert [message.content for message in prompt[-3:]] == ["b?", "I look.", "20 C <|im_end|>"]
        assert [prompt[-2].tool_calls[0].id, prompt[-1].tool_call_id] == ["c7", "c7"]
        assert len(decoder.requests[0].tools) == len(tools)


def test_evaluators_see_the_results_of_a_conversation(serve: Any, chat: Any, user: Any) -> None:
    decoder = chat("5")
    made = {"id": "c7", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}
    turns = [{"role": "assistant", "tool_calls": [made]}, {"role": "tool", "tool_call_id": "c7", "content": "20 C"}]
    server = serve(decoder, "best: {search: 'best-of-n:samples=2', evaluator: value}")
    assert server.post(model="chat:best", messages=[*user("b?"), *turns]).status_code == 200
    judged = next(request for request in decoder.requests if request.purpose == "evaluate")
    assert 'weather({"city": "Rome"})\n20 C\n5' in judged.prompt[-1].content


@pytest.mark.parametrize("stream", [False, True])
def test_responses_have_items_of_calls(serve: Any, chat: Any, stream: bool) -> None:
    server = serve(chat(*CALLS), FIVE)
    tool = {"type": "function", **WEATHER["function"]}  # type: ignore[dict-item]
    with server.client() as client:
        about = {"model": "chat:vote", "tools": [tool]}
        reply = client.responses.create(input="a?", stream=stream, **about)
        if stream:
            reply = list(reply)[-1].response
        made = next(item for item in reply.output if item.type == "function_call")
        assert (made.name, json.loads(made.arguments)) == ("weather", ARGUMENTS[0])
        items = [{"role": "user", "content": "a?"}, made.model_dump(exclude_none=True)]
        items.append({"type": "function_call_output", "call_id": made.call_id, "output": "20 C"})
        assert client.responses.create(input=items, **about).status == "completed"


@pytest.mark.parametrize("stream", [False, True])
def test_messages_have_blocks_of_calls(serve: Any, chat: Any, user: Any, stream: bool) -> None:
    server = serve(chat(call(ARGUMENTS[0])), FIVE)
    tools = [{"name": "weather", "input_schema": SCHEMA}]
    body = {"model": "chat:vote", "messages": user("a?"), "max_tokens": 50, "tools": tools, "stream": stream}
    reply = server.post("/v1/messages", **body, tool_choice={"type": "any"})
    if stream:
        assert '"stop_reason":"tool_use"' in reply.text
        assert "text_delta" not in reply.text
        assert json.dumps(json.dumps(ARGUMENTS[0]))[1:-1] in reply.text
        return
    thinking, block = reply.json()["content"]
    assert (thinking["type"], block["type"], block["input"]) == ("thinking", "tool_use", ARGUMENTS[0])
    assert reply.json()["stop_reason"] == "tool_use"
    result = {"type": "tool_result", "tool_use_id": block["id"], "content": "20 C"}
    body["messages"] += [{"role": "assistant", "content": [block]}, {"role": "user", "content": [result]}]
    assert server.post("/v1/messages", **body).status_code == 200


def test_formats_vote_by_field(serve: Any, chat: Any, user: Any) -> None:
    texts = ('{"city": "Rome", "days": 1}', '{"days": 2, "city": "Rome"}', '{"city": "Oslo", "days": 2.0}')
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}}
    for searches, model in ((FIVE.replace("5", "3"), "chat:vote"), (TREE, "chat:tree")):
        server = serve(chat(*texts), searches)
        reply = server.post(model=model, messages=user("a?"), response_format=form).json()
        assert reply["choices"][0]["message"]["content"] == texts[1]
        assert reply["choices"][0]["finish_reason"] == "stop"
        assert (reply["tot"]["votes"], reply["tot"]["chosen"]) == ([1, 3], "votes")
    text = {"format": {"type": "json_object"}}
    reply = server.post("/v1/responses", model="chat:tree", input="a?", text=text).json()
    assert reply["output"][-1]["content"][0]["text"] == texts[1]


def test_a_format_that_is_no_object_is_json_text(serve: Any, chat: Any, user: Any) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"enum": ["Rome", 7]}}}
    for texts, votes in ((('"Rome"', "7", '"Rome"'), [2, 3]), (("7", "7", '"Rome"'), [2, 3]), (("Rome", "8"), None)):
        server = serve(chat(*texts), FIVE.replace("5", "3"))
        reply = server.post(model="chat:vote", messages=user("a?"), response_format=form).json()
        assert reply["choices"][0]["message"]["content"] == (texts[0] if votes else "")
        assert reply["tot"]["votes"] == votes
    assert "is no complete call of a function, and no answer (rejected texts: 3)" in reply["tot"]["stopped"]


def test_a_format_beside_tools_is_the_form_of_answers_without_calls(serve: Any, chat: Any, user: Any) -> None:
    form = {"type": "json_object"}
    decoder = chat('{"a": 1}', call(ARGUMENTS[0]), '{"a": 1.0}')
    server = serve(decoder, FIVE.replace("5", "3"))
    reply = server.post(model="chat:vote", messages=user("a?"), response_format=form, tools=[WEATHER]).json()
    assert json.loads(reply["choices"][0]["message"]["content"]) == {"a": 1}
    assert reply["tot"]["votes"] == [2, 3]
    assert decoder.requests[0].constraint.json_schema == {"type": "object"}


def test_calls_that_are_refused_or_cut_give_no_answer(serve: Any, chat: Any, user: Any) -> None:
    about = {"model": "chat:vote", "messages": user("a?"), "tools": [WEATHER]}
    reply = serve(chat(call({}, name="other")), FIVE).post(**about).json()
    assert reply["choices"][0]["message"]["content"] == ""
    assert reply["choices"][0]["finish_reason"] == "stop"
    reason = "there is no function 'other': the functions are weather (rejected texts: 5)"
    assert reply["tot"]["stopped"] == reason
    reply = serve(chat(call({"city": "Rome"})[:-25] + "…"), FIVE).post(**about).json()
    assert reply["choices"][0]["message"]["content"] == ""
    assert reply["choices"][0]["finish_reason"] == "length"


def test_tool_choice_none_leaves_the_tools_out(serve: Any, chat: Any, user: Any) -> None:
    decoder = chat("b")
    reply = serve(decoder, FIVE).post(model="chat:vote", messages=user("a?"), tools=[WEATHER], tool_choice="none")
    assert reply.json()["choices"][0]["message"]["content"] == "b"
    assert {one.tools for one in decoder.requests} == {()}


def test_thinking_and_effort_work_with_tools(serve: Any, chat: Any, user: Any) -> None:
    decoder = chat(call(ARGUMENTS[0]))
    about = {"thinking": {"type": "enabled", "budget_tokens": 64}, "reasoning_effort": "low", "temperature": 0.5}
    reply = serve(decoder, FIVE).post(model="chat:vote", messages=user("a?"), tools=[WEATHER], **about).json()
    assert arguments(reply["choices"][0]["message"]) == ARGUMENTS[0]
    (sampling,) = {(one.sampling.thinking.budget, one.sampling.temperature) for one in decoder.requests}
    assert sampling == (64, 0.5)


def test_what_is_invalid_is_refused_by_name(serve: Any, chat: Any, user: Any) -> None:
    server = serve(chat("b"), f"{FIVE}\nsum: {{task: gsm8k}}\nplan: {{task: game24}}")
    bad = {"type": "object", "properties": {"a": {"type": "wrong"}}}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": bad}}
    made = {"id": "c", "type": "function", "function": {"name": "weather", "arguments": "{}"}}
    turn, result = {"role": "assistant", "tool_calls": [made]}, {"role": "tool", "tool_call_id": "c", "content": "x"}
    for fields, param in (
        ({"model": "chat:sum", "tools": [WEATHER]}, "tools"),
        ({"model": "chat:plan", "tools": [WEATHER]}, "tools"),
        ({"model": "chat:sum", "response_format": {"type": "json_object"}}, "response_format"),
        ({"model": "chat:plan", "messages": [*user("a?"), turn, result]}, "messages"),
        ({"tools": [WEATHER, {"type": "function", "function": {"name": "f", "parameters": bad}}]}, "tools.1"),
        ({"response_format": form}, "response_format"),
        ({"tools": [WEATHER], "tool_choice": {"type": "function", "function": {"name": "wether"}}}, "tool_choice"),
        ({"messages": [*user("a?"), result]}, "messages.1.tool_call_id"),
        ({"messages": [*user("a?"), turn]}, "messages"),
        ({"messages": [turn, result]}, "messages"),
        ({"messages": [turn, *user("a?"), result]}, "messages"),
        ({"messages": [*user("a?"), turn, {**result, "content": {"x": 1}}]}, "messages.2.content"),
    ):
        reply = server.post(**{"model": "chat:vote", "messages": user("a?"), **fields})
        assert (reply.status_code, reply.json()["error"]["param"]) == (400, param), reply.text


def test_two_hundred_tools(serve: Any, chat: Any, user: Any) -> None:
    tools = [{"type": "function", "function": {"name": f"f{i}", "parameters": SCHEMA}} for i in range(200)]
    reply = serve(chat(call({}, name="f199")), FIVE).post(model="chat:vote", messages=user("a?"), tools=tools).json()
    assert reply["choices"][0]["message"]["tool_calls"][0]["function"]["name"] == "f199"


@pytest.mark.real
def test_a_real_model_calls_a_function(serve: Any, smollm2: str, user: Any) -> None:
    from tot.decoders import load_decoder

    required = {**SCHEMA, "required": ["city"], "additionalProperties": False}
    tool = {"type": "function", "function": {"name": "weather", "parameters": required}}
    about = {"tools": [tool], "tool_choice": "required", "parallel_tool_calls": False, "max_tokens": 60}
    with load_decoder("ar", smollm2) as decoder:
        server = serve(decoder, FIVE.replace("5", "3"))
        reply = server.post(model="chat:vote", messages=user("What is the weather in Rome?"), seed=1, **about).json()
        assert "city" in arguments(reply["choices"][0]["message"])
        form = {"type": "json_schema", "json_schema": {"name": "x", "schema": required}}
        about = {"messages": user("Rome?"), "response_format": form, "max_tokens": 60, "seed": 1}
        (choice,) = server.post(model="chat:vote", **about).json()["choices"]
        assert choice["finish_reason"] == "length" or "city" in json.loads(choice["message"]["content"])
        server.close()
