"""Tools and constraints on real servers, which have some of them: calls come back, and other replies are checked."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from tot.decoders import Constraint, Function, Message, Request, RequestError, Sampling

pytestmark = pytest.mark.servers

CITY = {"type": "object", "properties": {"city": {"type": "string", "maxLength": 20}}, "required": ["city"]}
WEATHER = Function(name="weather", description="Return the weather in a city.", parameters=CITY)
QUESTION = Message(role="user", content="What is the weather in Paris?")  # language: ok
SPELLED = Message(
    role="user", content='Write <tool_call> {"name": "weather", "arguments": {"city": "Paris"}} </tool_call>'
)
SAMPLING = Sampling(max_tokens=40)


def ask(**about: Any) -> Request:
    return Request(
        **{"prompt": (QUESTION,), "tools": (WEATHER,), "tool_choice": "weather", "sampling": SAMPLING, **about}
    )


def test_a_named_function_is_called(llama_server: Any, remote: Callable[..., Any]) -> None:
    decoder = remote(llama_server)
    (completion,) = decoder.generate([ask()])
    text, (call,) = decoder.read_calls(completion)
    assert (text, call.name, set(json.loads(call.arguments))) == ("", "weather", {"city"})
    assert completion.usage.new_tokens > 3
    called = Message(role="assistant", content=text, tool_calls=(call,))
    result = Message(role="tool", content="20 degrees and sunny", tool_call_id=call.id)
    (answer,) = decoder.generate([Request(prompt=(QUESTION, called, result), sampling=SAMPLING)])
    assert answer.text


def test_vllms_calls_are_valid_or_an_error(vllm_caller: Any, remote: Callable[..., Any]) -> None:
    """vLLM does not force the arguments of a named function into its schema, and the model may write others."""
    decoder, read = remote(vllm_caller), list[str]()
    for choice in ("auto", "required", "weather"):
        try:
            (completion,) = decoder.generate([ask(prompt=(SPELLED,), tool_choice=choice)])
        except RequestError as error:
            read.append(str(error))
            assert "returned 3 invalid replies" in read[-1]
            continue
        for call in decoder.read_calls(completion)[1]:
            read.append(call.arguments)
            assert (call.name, set(json.loads(call.arguments))) == ("weather", {"city"})
    assert read


def test_vllm_without_a_parser_of_calls_is_an_error_with_a_remedy(vllm_server: Any, remote: Callable[..., Any]) -> None:
    decoder = remote(vllm_server)
    with pytest.raises(RequestError, match="start vLLM with --enable-auto-tool-choice --tool-call-parser NAME"):
        decoder.generate([ask()])


def test_a_constraint_that_a_server_lacks_is_met_or_an_error(llama_server: Any, remote: Callable[..., Any]) -> None:
    asked = Message(role="user", content="Reply with the word yes, and nothing else.")
    decoder = remote(llama_server)
    about = {"prompt": (asked,), "sampling": SAMPLING}
    (completion,) = decoder.generate([Request(**about, constraint=Constraint(regex=r"[^0-9]*\S[^0-9]*"))])
    assert completion.finish_reason in ("eos", "length")
    with pytest.raises(RequestError, match="returned 3 invalid replies"):
        decoder.generate([Request(**about, constraint=Constraint(regex="[0-9]{90}"))])
