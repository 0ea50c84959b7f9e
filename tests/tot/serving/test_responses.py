"""The Responses API, whole and as events, read by OpenAI's own client."""

from __future__ import annotations

from typing import Any

import pytest
from openai.types.responses import Response

VOTE = "vote: {search: 'self-consistency:samples=3'}"
TEXTS = ("Paris", "Lyon", "Paris.")
THOUGHTS = "[1] Paris\n\n[2] Lyon\n\n[3] Paris.\n\n"


def test_a_response_has_reasoning_and_a_message(serve: Any, chat: Any) -> None:
    with serve(chat(*TEXTS), VOTE).client() as client:
        reply = client.responses.create(
            model="chat:vote", input="Which?", reasoning={"effort": "low"}, max_output_tokens=500, store=False
        )
    assert reply.output_text == "Paris"
    assert (reply.status, reply.reasoning.effort, reply.max_output_tokens) == ("completed", "low", 500)
    reasoning, message = reply.output
    assert (reasoning.type, message.type) == ("reasoning", "message")
    assert reasoning.content[0].text == THOUGHTS
    assert (reply.usage.input_tokens, reply.usage.output_tokens, reply.usage.total_tokens) == (10, 15, 25)
    assert reply.usage.output_tokens_details.reasoning_tokens == 15
    assert (reply.tot["votes"], reply.tot["solved"]) == ([2, 3], False)


def test_events_add_up_to_the_response(serve: Any, chat: Any) -> None:
    options = {"model": "chat:vote", "input": "Which?", "extra_body": {"seed": 1}}
    with serve(chat(*TEXTS), VOTE).client() as client:
        events = list(client.responses.create(**options, stream=True))
        with client.responses.stream(**options) as stream:
            final = stream.get_final_response()
    for event in events:  # the client parses without validation
        type(event).model_validate(event.to_dict())
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type.removeprefix("response.") for event in events]
    item = ["output_item.added", "content_part.added"]
    ended = ["content_part.done", "output_item.done"]
    assert kinds == [
        *("created", "in_progress"),
        *(*item, *["reasoning_text.delta"] * 3, "reasoning_text.done", *ended),
        *(*item, "output_text.delta", "output_text.done", *ended),
        "completed",
    ]
    last = events[-1].response
    Response.model_validate(last.to_dict())
    assert "".join(event.delta for event in events if event.type == "response.reasoning_text.delta") == THOUGHTS
    assert [item.to_dict() for item in last.output] == [
        event.item.to_dict() for event in events if event.type == "response.output_item.done"
    ]
    assert final.output_text == "Paris"


def test_thoughts_are_the_summary_if_the_client_asks_for_one(serve: Any, chat: Any) -> None:
    options = {"reasoning": {"summary": "auto"}, "include": ["reasoning.encrypted_content"]}
    with serve(chat(*TEXTS), VOTE).client() as client:
        events = list(client.responses.create(model="chat:vote", input="Which?", stream=True, **options))
    for event in events:
        type(event).model_validate(event.to_dict())
    kinds = [event.type.removeprefix("response.reasoning_summary_") for event in events]
    assert kinds[3:8] == ["part.added", *["text.delta"] * 3, "text.done"]
    assert "".join(event.delta for event in events[4:7]) == events[7].text == THOUGHTS
    last = events[-1].response
    assert last.reasoning.summary == "auto"
    assert [part.text for part in last.output[0].summary] == [THOUGHTS]
    assert (last.output[0].content, last.output_text) == ([], "Paris")


def test_the_output_of_a_reply_is_input_of_the_next(serve: Any, chat: Any) -> None:
    decoder = chat(*TEXTS)
    with serve(decoder, VOTE).client() as client:
        first = client.responses.create(model="chat:vote", input="Which?", instructions="Be brief.")
        turns = [{"role": "user", "content": "Which?"}, *first.output]
        more = [{"role": "user", "content": [{"type": "input_text", "text": "Why?"}]}]
        client.responses.create(model="chat:vote", input=[*turns, *more], instructions="Be kind.")
    expected = [("system", "Be kind."), ("user", "Which?"), ("assistant", "Paris"), ("user", "Why?")]
    assert [(message.role, message.content) for message in decoder.requests[-1].prompt] == expected


def test_a_response_that_a_limit_ends_is_incomplete(serve: Any, chat: Any) -> None:
    body = {"model": "chat:vote", "input": "a", "extra_body": {"x_tot": {"seconds": 1e-9}}}
    with serve(chat("b"), VOTE).client() as client:
        reply = client.responses.create(**body)
        *_, last = client.responses.create(**body, stream=True)
    assert (reply.status, reply.incomplete_details.reason, reply.output_text) == ("incomplete", "max_output_tokens", "")
    assert last.type == "response.incomplete"


def test_a_text_that_max_output_tokens_cut_is_incomplete(serve: Any, chat: Any) -> None:
    with serve(chat("It is…")).client() as client:
        cut = client.responses.create(model="chat", input="a", max_output_tokens=5)
        own = client.responses.create(model="chat", input="a", extra_body={"max_tokens": 5})
    assert (cut.status, cut.incomplete_details.reason, cut.output_text) == ("incomplete", "max_output_tokens", "It is…")
    assert (own.status, own.incomplete_details, own.output_text) == ("completed", None, "It is…")


def test_the_fields_of_agents_change_nothing(serve: Any, chat: Any) -> None:
    parts = [{"type": "input_text", "text": "a"}]
    fields = {
        "input": [{"type": "message", "role": "user", "content": parts}],
        "tools": [],
        "tool_choice": "auto",
        "parallel_tool_calls": False,
        "store": False,
        "service_tier": "auto",
        "reasoning": {"effort": "minimal", "summary": "auto"},
        "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": "k",
        "client_metadata": {"a": "b"},
        "text": {"verbosity": "low"},
    }
    reply = serve(chat("b"), VOTE).post("/v1/responses", model="chat:vote", instructions="Be short.", **fields)
    assert reply.status_code == 200
    assert reply.json()["output"][-1]["content"][0]["text"] == "b"
    assert reply.json()["reasoning"]["effort"] == "minimal"


def test_what_is_not_supported_is_refused_by_name(serve: Any, chat: Any) -> None:
    server = serve(chat("b"), VOTE)
    for fields, param in (
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"store": True}, "store"),
        ({"background": True}, "background"),
        ({"include": ["message.output_text.logprobs"]}, "include"),
        ({"tools": [{"type": "web_search"}]}, "tools"),
        ({"truncation": "auto"}, "truncation"),
        ({"reasoning": {"effort": "low", "summary": "long"}}, "reasoning.summary"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"n": 2}, "n"),
        ({"input": 5}, "input"),
        ({"input": [{"type": "function_call_output", "output": "x"}]}, "input.0.tool_call_id"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input.0.content"),
        ({"messages": []}, "messages"),
        ({"model": "chat:none"}, "model"),
    ):
        reply = server.post("/v1/responses", **{"model": "chat:vote", "input": "a", **fields})
        assert reply.status_code == (404 if param == "model" else 400)
        assert reply.json()["error"]["param"] == param


def test_an_error_ends_the_stream_as_an_event(serve: Any, chat: Any) -> None:
    from tot.decoders import ModelError

    decoder = chat("b")

    def fail(*_: Any) -> Any:
        raise ModelError("the model is gone")

    decoder.start = fail
    with serve(decoder, VOTE).client() as client:
        with pytest.raises(Exception, match="the model is gone"):
            list(client.responses.create(model="chat:vote", input="a", stream=True))
        with pytest.raises(Exception, match="the model is gone"):
            client.responses.create(model="chat:vote", input="a")
