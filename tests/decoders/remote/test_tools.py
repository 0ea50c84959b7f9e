"""Tools on servers: the fields, the calls in replies, and replies that are checked and requested again."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tot.decoders import Constraint, Function, Message, OptionError, Request, RequestError, Sampling, ToolCall

ARGUMENTS = '{"city": "Rome", "days": 3}'
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "pattern": "^(R|o)+"}, "days": {"type": "integer", "maximum": 9}},
    "required": ["city"],
}
WEATHER = Function(name="weather", description="Return the weather.", parameters=SCHEMA)
NOW = Function(name="now")
USER = Message(role="user", content="q")
KINDS = ["vllm", "sglang", "llama-server", "ollama", "openai"]


def request(**about: Any) -> Request:
    return Request(**{"prompt": (USER,), "tools": (WEATHER, NOW), **about})


def call(name: str = "weather", arguments: Any = ARGUMENTS) -> dict[str, Any]:
    return {"id": "x1", "type": "function", "function": {"name": name, "arguments": arguments}}


def called(*calls: Any, text: str | None = None, finish: str = "tool_calls") -> list[dict[str, Any]]:
    return [{"text": text, "message": {"tool_calls": [*calls]}, "finish_reason": finish}]


def in_turn(*replies: Any) -> Any:
    """Return replies one after another, and the last one for ever."""
    left = list(replies)
    return lambda path, body: left.pop(0) if len(left) > 1 else left[0]


@pytest.mark.parametrize("kind", [*KINDS, "tot"])
def test_tools_calls_and_results_are_sent(server: Any, remote: Any, kind: str) -> None:
    turn = Message(role="assistant", content="", tool_calls=(ToolCall(name="now", arguments="{}", id="c1"),))
    result = Message(role="tool", content="5", tool_call_id="c1")
    server.reply = in_turn(called(call()))
    remote(server=kind).generate([request(prompt=(USER, turn, result), parallel_tool_calls=False)])
    body = server.posts[0].body
    schema = {**SCHEMA, "additionalProperties": False}
    function = {"name": "weather", "description": "Return the weather.", "parameters": schema}
    assert body["tools"][0] == {"type": "function", "function": function}
    assert [tool["function"]["name"] for tool in body["tools"]] == ["weather", "now"]
    assert (body["tool_choice"], body["parallel_tool_calls"]) == ("auto", False)
    sent = {"id": "c1", "type": "function", "function": {"name": "now", "arguments": "{}"}}
    assert body["messages"][1:] == [
        {"role": "assistant", "content": "", "tool_calls": [sent]},
        {"role": "tool", "content": "5", "tool_call_id": "c1"},
    ]


def test_a_choice_of_a_tool_is_sent(server: Any, remote: Any) -> None:
    server.reply = in_turn(called(call("now", "")))
    decoder = remote()
    for choice, sent in (("required", "required"), ("now", {"type": "function", "function": {"name": "now"}})):
        (completion,) = decoder.generate([request(tool_choice=choice)])
        assert server.posts[-1].body["tool_choice"] == sent
        assert "parallel_tool_calls" not in server.posts[-1].body
        content, (read,) = decoder.read_calls(completion)
        assert (content, read.name, read.arguments, completion.finish_reason) == ("", "now", "{}", "eos")


@pytest.mark.parametrize("arguments", [ARGUMENTS, json.loads(ARGUMENTS)])
@pytest.mark.parametrize("text", [None, "", "Let me look."])
def test_calls_come_back(server: Any, remote: Any, arguments: Any, text: str | None) -> None:
    server.reply = in_turn(called(call(arguments=arguments), call("now", "{}"), text=text))
    with_stop = request(sampling=Sampling(stop=("\n", "Rome")))
    for decoder in (remote(), remote(logprobs=True)):
        (completion,) = decoder.generate([with_stop])
        content, calls = decoder.read_calls(completion)
        assert (content, [(one.name, one.arguments) for one in calls]) == (
            text or "",
            [("weather", ARGUMENTS), ("now", "{}")],
        )
        assert len({one.id for one in calls}) == 2
        assert completion.usage.new_tokens == 3
    assert not any("stop" in asked.body for asked in server.posts)  # it could end a call


def test_calls_after_a_stop_string_are_left_out(server: Any, remote: Any) -> None:
    server.reply = in_turn(called(call(), text="Let me. Look."))
    decoder = remote()
    (completion,) = decoder.generate([request(sampling=Sampling(stop=(".",)))])
    assert (completion.text, completion.finish_reason) == ("Let me", "stop")
    assert decoder.read_calls(completion) == ("Let me", [])


def test_a_call_that_is_cut_is_text(server: Any, remote: Any) -> None:
    server.reply = in_turn(called(call(), call(arguments='{"city": "Ro'), finish="length"))
    decoder = remote()
    (completion,) = decoder.generate([request()])
    assert completion.finish_reason == "length"
    assert [one.arguments for one in decoder.read_calls(completion)[1]] == [ARGUMENTS]
    server.reply = in_turn(called(call(arguments='{"city": "Ro'), finish="length"))
    content, calls = decoder.read_calls(decoder.generate([request()])[0])
    assert ('{"city": "Ro' in content, calls) == (True, [])


INVALID: list[tuple[Any, dict[str, Any], str]] = [
    (called(call(arguments='{"city": "Ro')), {}, "are not a JSON object"),
    (called(call(arguments="[1]")), {}, "are not a JSON object"),
    (called(call(arguments='{"city": 1}')), {}, '1 is not of type "string"'),
    (called(call(arguments='{"days": 3}')), {}, '"city" is a required property'),
    (called(call(arguments='{"city": "R", "x": 1}')), {}, "'x' was unexpected"),
    (called(call(arguments='{"city": "x"}')), {}, "does not match"),
    (called(call("whether")), {}, "it calls 'whether', and the request allows weather, now"),
    (called(call("we ather")), {}, "a call is malformed"),
    (called(call("\ud800")), {}, "a call is malformed"),
    (called(call(arguments='{"city": "\ud800", "days": 1' + "0" * 500 + "}")), {}, "arguments of weather are invalid"),
    (called(call("now", "{}")), {"tool_choice": "weather"}, "it calls 'now', and the request allows weather"),
    (called(call(), call()), {"parallel_tool_calls": False}, "it has 2 calls, and the request allows one"),
    (called(call(), call()), {"tool_choice": "weather"}, "it has 2 calls"),
    ([{"text": "No."}], {"tool_choice": "required"}, "it has no call, and tool_choice is required"),
    ([{"text": "<tool_call>\nweather"}], {}, "a call is malformed"),
    ([{"text": "No."}], {"constraint": Constraint(json_schema={"type": "integer"})}, "not of the form json_schema"),
]


@pytest.mark.parametrize(("invalid", "about", "message"), INVALID)
def test_an_invalid_reply_is_requested_again(
    server: Any, remote: Any, invalid: Any, about: dict[str, Any], message: str
) -> None:
    name = about.get("tool_choice", "weather").replace("required", "weather")
    server.reply = in_turn(invalid, invalid, called(call(name)))
    decoder = remote()
    (completion,) = decoder.generate([request(**about, sampling=Sampling(seed=4))])
    assert [one.name for one in decoder.read_calls(completion)[1]] == [name]
    assert completion.usage.new_tokens == 9
    assert len({asked.body["seed"] for asked in server.posts}) == 3
    assert [asked.body["temperature"] for asked in server.posts] == [0, 1, 1]
    server.reply = in_turn(invalid)
    with pytest.raises(RequestError, match=f"returned 1 invalid replies .*{message}.*, such as .*: describe the form"):
        remote(output_retries=0).generate(
            [request(**{"parallel_tool_calls": True, **about}).model_copy(update={"sampling": Sampling(seed=4)})]
        )


@pytest.mark.parametrize(
    ("given", "valid", "invalid"),
    [
        ({"regex": "[0-9]+ km"}, "12 km", "12 miles"),
        ({"choices": ("yes", "no")}, "no", "maybe"),
        ({"lark": 'start: "(" start ")" | "x"'}, "((x))", "((x)"),
        (
            {"json_schema": {"type": "object", "properties": {"a": {"type": "integer"}}}},
            '{"b": 1, "a": 2}',
            '{"a": "b"}',
        ),
    ],
)
@pytest.mark.parametrize("form", ["{}", " {}\n", "```\n{}\n```"])
def test_a_constraint_that_the_server_lacks_is_checked(
    server: Any, remote: Any, given: dict[str, Any], valid: str, invalid: str, form: str
) -> None:
    server.reply = in_turn([{"text": invalid}, {"text": valid}], [{"text": form.replace("{}", valid)}])
    asked = Request(prompt="q", constraint=Constraint(**given), sampling=Sampling(n=2, temperature=1.0, stop=("#",)))
    first, second = remote(server="openai").generate([asked])
    assert (first.text.strip(), second.text) == (valid, valid)
    assert (first.parts[-1].text, first.finish_reason) == (first.text, "eos")
    assert (first.usage.new_tokens, second.usage.new_tokens) == (6, 3)
    assert server.posts[0].body.keys() & {"response_format", "stop"} == set()
    assert [asked.body.get("n", 1) for asked in server.posts] == [2, 1]


def test_all_replies_of_a_server_that_enforces_the_form_are_taken(server: Any, remote: Any) -> None:
    server.reply = in_turn([{"text": "no"}])
    asked = Request(prompt=(USER,), constraint=Constraint(json_schema={"type": "integer"}))
    for kind in ("vllm", "sglang", "llama-server", "ollama", "tot"):
        assert remote(server=kind).generate([asked])[0].text == "no"
    with pytest.raises(RequestError, match=r"returned 3 invalid replies .*, such as 'no'.*raise output_retries"):
        remote(server="openai").generate([asked])


def test_a_constraint_beside_tools_is_the_form_of_an_answer(server: Any, remote: Any) -> None:
    asked = request(constraint=Constraint(json_schema={"type": "integer"}))
    server.reply = in_turn([{"text": "5"}])
    for kind in KINDS:
        assert remote(server=kind).generate([asked])[0].text == "5"
        assert ("response_format" in server.posts[-1].body) == (kind == "openai")
    with pytest.raises(RequestError, match="vLLM has no constraint beside tools: leave one out, use tot serve"):
        remote(server="vllm", output_retries=0).generate([asked])


@pytest.mark.parametrize(
    ("kind", "said", "remedy"),
    [
        (
            "vllm",
            '"auto" tool choice requires --enable-auto-tool-choice and --tool-call-parser to be set',
            "start vLLM with --enable-auto-tool-choice --tool-call-parser NAME",
        ),
        ("llama-server", "tools param requires --jinja flag", "start llama-server with --jinja"),
        ("ollama", "registry.ollama.ai/library/x does not support tools", "use a model with tools"),
        ("openai", "Unrecognized request argument supplied: tools", "use a model with tools, or another server"),
    ],
)
def test_a_server_without_tools_gets_a_remedy(server: Any, remote: Any, kind: str, said: str, remedy: str) -> None:
    server.reply = lambda path, body: (400, {"error": {"message": said}})
    with pytest.raises(RequestError, match=remedy) as raised:
        remote(server=kind).generate([request()])
    assert said in str(raised.value)
    assert len(server.posts) == 1


@pytest.mark.parametrize(
    ("about", "message"),
    [
        ({"tools": (Function(name="f", parameters={"properties": {"a": {"type": "no"}}}),)}, "invalid .*: correct it"),
        ({"tools": (Function(name="f", parameters={"$ref": "http://127.0.0.1:9/x"}),)}, "invalid .*not in the schema"),
        ({"tools": (), "constraint": Constraint(regex="(")}, "invalid .*: correct it"),
        ({"tools": (), "constraint": Constraint(lark="x")}, "invalid .*: correct it"),
        ({"answer_trigger": " So"}, "do not go with an answer trigger"),
    ],
)
def test_impossible_requests_are_refused_before_they_are_sent(
    server: Any, remote: Any, about: dict[str, Any], message: str
) -> None:
    with pytest.raises((RequestError, OptionError), match=message):
        remote().generate([request(**about)])
    assert server.posts == []


def test_hostile_arguments_are_checked_in_no_time(server: Any, remote: Any) -> None:
    deep, slow = "[" * 100_000, json.dumps({"city": "R" * 30_000 + "!"})
    pattern = {"properties": {"city": {"type": "string", "pattern": "^(R+)+$"}, "x": {"$ref": "#"}}}
    tool = Function(name="weather", parameters=pattern)
    for arguments in (slow, '{"x": ' * 90_000, '{"city": ' + deep, '{"city": 1e999}'):
        server.reply = in_turn(called(call(arguments=arguments)))
        with pytest.raises(RequestError, match="invalid replies"):
            remote(output_retries=0).generate([request(tools=(tool,))])


def test_equal_calls_are_no_sign_of_a_cache(server: Any, remote: Any, caplog: Any) -> None:
    server.reply = lambda path, body: called(call()) * body["n"]
    completions = remote().generate([request(sampling=Sampling(n=3, temperature=1.0))])
    assert len({one.text for one in completions}) == len(server.posts) == 1
    assert caplog.text == ""


def test_the_key_is_not_part_of_the_error(server: Any, remote: Any, key: str) -> None:
    server.reply = in_turn(called(call(key, f'{{"{key}": "\x1b[31m{key}"}}')))
    with pytest.raises(RequestError, match="invalid replies") as raised:
        remote().generate([request()])
    assert key not in str(raised.value)
    assert str(raised.value).isprintable()
