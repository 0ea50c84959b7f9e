"""A server sets the thinking of its model, and returns it in a field of its own, whole or streamed."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from typing import Any

import openai
import pytest

from tot.decoders import Completion, Message, Request, Sampling, load_decoder

HOT = {"temperature": 1.0, "seed": 11}
USER = (Message(role="user", content="q"),)
SWITCH = "assistant\n' }}{% if enable_thinking is defined and not enable_thinking %}{{ 'No.' }}{% endif %}{{ '<think>\n"


@pytest.fixture
def thinker(server: Any, use: Callable[..., None]) -> Any:
    """A server whose chat template opens the thinking."""
    use(server, server.decoder.tokenizer.chat_template.replace("assistant\n", SWITCH))
    return server


def local(server: Any, prompt: Any = USER, template: dict[str, Any] | None = None, **sampling: Any) -> Completion:
    request = Request(prompt=prompt, sampling=Sampling(**HOT | sampling), template_options=template or {})
    (completion,) = server.decoder.generate([request])
    return completion


def spent(completion: Completion) -> tuple[int, int]:
    """Return the sampled tokens, and the ones of the thinking."""
    assert [part.kind for part in completion.parts] == ["thinking", "closing", "exact"]
    return len(completion.tokens), completion.parts[0].tokens


def test_thinking_is_reasoning_content_and_an_answer_follows(thinker: Any, client: openai.OpenAI, says: Any) -> None:
    reply = client.chat.completions.create(model="tiny", messages=says("q"), max_tokens=40, **HOT)
    expected = local(thinker, max_tokens=40, thinking={"counted": True})
    assert len(expected.tokens) == 40
    assert len(expected.text) > 5
    message, usage = reply.choices[0].message, reply.usage
    assert (message.content, message.reasoning_content) == (expected.text, expected.thinking)
    assert reply.choices[0].finish_reason == "length"
    assert (usage.completion_tokens, usage.completion_tokens_details.reasoning_tokens) == spent(expected) == (40, 20)
    options = {"stream": True, "stream_options": {"include_usage": True}, "max_tokens": 40}
    chunks = [*client.chat.completions.create(model="tiny", messages=says("q"), **options, **HOT)]
    deltas = [chunk.choices[0].delta for chunk in chunks if chunk.choices]
    thinking = [delta.reasoning_content for delta in deltas if getattr(delta, "reasoning_content", None)]
    assert (len(thinking) > 3, "".join(thinking)) == (True, expected.thinking)
    assert "".join(delta.content or "" for delta in deltas) == expected.text
    assert chunks[-1].usage.completion_tokens_details.reasoning_tokens == 20


AMOUNTS = [
    ({"reasoning_effort": "none"}, {"budget": "off"}),
    ({"reasoning_effort": "minimal"}, {"budget": "low"}),
    ({"reasoning_effort": "xhigh"}, {"budget": "high"}),
    ({"thinking_budget": 7}, {"budget": 7}),
    ({"thinking": {"type": "enabled", "budget_tokens": 7}}, {"budget": 7}),
    ({"thinking": {"type": "enabled"}}, {"budget": "medium"}),
    ({"thinking": {"type": "disabled"}}, {"budget": "off"}),
    ({"thinking": {"type": "adaptive"}, "thinking_budget": 9}, {"budget": 9}),
    ({"thinking": "9,hint=So"}, {"budget": 9, "hint": "So"}),
    ({"thinking": {"hint": "So"}, "reasoning_effort": "low", "thinking_budget": 1024}, {"budget": "low", "hint": "So"}),
]


@pytest.mark.parametrize(("fields", "thinking"), AMOUNTS)
def test_fields_set_the_thinking(
    serve: Any, use: Any, says: Any, fields: dict[str, Any], thinking: dict[str, Any]
) -> None:
    server = serve(max_tokens_limit=1024)
    use(server, server.decoder.tokenizer.chat_template.replace("assistant\n", SWITCH))
    expected = local(server, max_tokens=30, thinking={**thinking, "counted": True})
    body = {"model": "tiny", "messages": says("q"), "max_tokens": 30, **HOT, **fields}
    reply = server.post(**body).json()
    message = reply["choices"][0]["message"]
    assert (message["content"], message.get("reasoning_content", "")) == (expected.text, expected.thinking)
    assert reply["usage"]["completion_tokens_details"]["reasoning_tokens"] == expected.parts[0].tokens * (
        expected.parts[0].kind == "thinking"
    )
    effort = fields.get("reasoning_effort")
    responses = {**body, "input": "q", "reasoning": {"effort": effort} if effort else None}
    output = server.post(
        "/v1/responses", **{k: v for k, v in responses.items() if k not in ("messages", "reasoning_effort")}
    )
    assert output.json()["output"][-1]["content"][0]["text"] == expected.text


def test_a_text_completion_thinks_too(thinker: Any) -> None:
    prompt = "Question\n<think>\n"
    expected = local(thinker, prompt=prompt, max_tokens=30, thinking={"budget": 8, "counted": True})
    body = {"model": "tiny", "prompt": prompt, "max_tokens": 30, **HOT}
    assert thinker.post("/v1/completions", **body, thinking_budget=8).json()["choices"][0]["text"] == expected.text
    refused = thinker.post("/v1/completions", **body, chat_template_kwargs={"enable_thinking": False})
    assert "chat_template_kwargs is not supported" in refused.json()["error"]["message"]


REFUSED = [
    (
        {"thinking_budget": 301},
        "thinking_budget",
        "thinking_budget is 301 and this server's limit is 300: request fewer",
    ),
    ({"thinking": 301}, "thinking", "thinking is 301 and this server's limit is 300"),
    ({"thinking_budget": 7, "reasoning_effort": "low"}, "reasoning_effort", "thinking_budget and reasoning_effort set"),
    ({"thinking": 8, "thinking_budget": 7}, "thinking_budget", "thinking and thinking_budget set different budgets"),
    ({"thinking": {"type": "disabled", "budget_tokens": 5}}, "thinking", 'the type is "enabled", with budget_tokens'),
    ({"thinking": {"type": "on"}}, "thinking", 'the type is "enabled", with budget_tokens'),
    ({"thinking": {"budget": 7, "depth": 2}}, "thinking.depth", "thinking.depth is not supported"),
    ({"thinking": {"waits": -1}}, "thinking.waits", "greater than or equal to 0"),
    ({"thinking_budget": -1}, "thinking_budget", "greater than or equal to 0"),
    ({"thinking_budget": "7"}, "thinking_budget", "valid integer"),
    ({"thinking_tokens": 7}, "thinking_tokens", "thinking_tokens is not supported"),
    (
        {"chat_template_kwargs": {"tools": []}},
        "chat_template_kwargs",
        "the template option 'tools' is set by the decoder",
    ),
    ({"chat_template_kwargs": [1]}, "chat_template_kwargs", "should be an object"),
]


@pytest.mark.parametrize(("fields", "param", "message"), REFUSED)
def test_contradictory_and_excessive_fields_are_refused_by_name(
    server: Any, says: Any, fields: dict[str, Any], param: str, message: str
) -> None:
    for route, question in (("/v1/chat/completions", {"messages": says("q")}), ("/v1/responses", {"input": "q"})):
        reply = server.post(route, model="tiny", **question, **fields)
        error = reply.json()["error"]
        assert (reply.status_code, error["param"]) == (400, param)
        assert message in error["message"]


def test_two_efforts_of_a_response_are_refused(server: Any) -> None:
    body = {"model": "tiny", "input": "q", "reasoning": {"effort": "low"}}
    assert server.post("/v1/responses", **body, reasoning_effort="low", max_output_tokens=3).status_code == 200
    error = server.post("/v1/responses", **body, reasoning_effort="high").json()["error"]
    assert (error["param"], "differ: give one" in error["message"]) == ("reasoning_effort", True)


def test_options_reach_the_template(thinker: Any, client: openai.OpenAI, says: Any) -> None:
    options = {"enable_thinking": False}
    expected = local(thinker, template=options, max_tokens=30, thinking={"budget": 5, "counted": True})
    assert expected.usage.prompt_tokens > local(thinker, max_tokens=2).usage.prompt_tokens
    body = {"chat_template_kwargs": options, "thinking_budget": 5}
    reply = client.chat.completions.create(model="tiny", messages=says("q"), max_tokens=30, **HOT, extra_body=body)
    assert reply.choices[0].message.content == expected.text
    assert reply.usage.prompt_tokens == expected.usage.prompt_tokens


@pytest.mark.parametrize(
    "sampling", [{"thinking": 30}, {"thinking": "off"}, {}, {"thinking": "30,settle=0.01,waits=1"}]
)
def test_a_remote_decoder_draws_the_same_thinking_and_answer(thinker: Any, sampling: dict[str, Any]) -> None:
    sampling = {"temperature": 1.0, "max_tokens": 8, "seed": 3, "n": 2, **sampling}
    request = Request(prompt=USER, sampling=Sampling(**sampling), template_options={"enable_thinking": False})
    with closing(load_decoder("openai", "tiny", base_url=f"{thinker.url}/v1")) as remote:
        there = remote.generate([request])
    if not sampling.get("thinking"):  # up to this server's limit
        request = request.model_copy(update={"sampling": Sampling(**{**sampling, "thinking": {"budget": 300}})})
        request = request.model_copy(update={"template_options": {"enable_thinking": False}})
    for one, other in zip(thinker.decoder.generate([request]), there, strict=True):
        assert (one.text, one.parts, one.tokens, one.finish_reason) == (
            *(other.text, other.parts, other.tokens),
            other.finish_reason,
        )
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-4)
        assert one.text


def test_log_probabilities_are_those_of_the_text(thinker: Any, client: openai.OpenAI, says: Any) -> None:
    expected = local(thinker, max_tokens=20, thinking={"budget": 6, "hint": "So", "counted": True})
    spent_tokens = expected.parts[0].tokens
    body = {"thinking": {"budget": 6, "hint": "So"}}
    options = {"logprobs": True, "top_logprobs": 1, "max_tokens": 20, "extra_body": body}
    choice = client.chat.completions.create(model="tiny", messages=says("q"), **options, **HOT).choices[0]
    values = [entry.logprob for entry in choice.logprobs.content]
    assert values == pytest.approx(expected.logprobs[spent_tokens:], abs=1e-4)
    assert (len(values), choice.message.content) == (20 - spent_tokens, expected.text)


def test_a_response_has_reasoning_and_a_message(thinker: Any, client: openai.OpenAI) -> None:
    expected = local(thinker, max_tokens=40, thinking={"budget": 16, "counted": True})
    options = {"max_output_tokens": 40, "temperature": 1.0, "extra_body": {"seed": 11, "thinking_budget": 16}}
    reply = client.responses.create(model="tiny", input="q", **options)
    reasoning, message = reply.output
    assert (reasoning.content[0].text, message.content[0].text) == (expected.thinking, expected.text)
    details = reply.usage.output_tokens_details.reasoning_tokens
    assert (reply.usage.output_tokens, details) == spent(expected) == (40, 16)
    events = [*client.responses.create(model="tiny", input="q", stream=True, **options)]
    texts = {
        kind: "".join(event.delta for event in events if event.type == f"response.{kind}.delta")
        for kind in ("reasoning_text", "output_text")
    }
    assert texts == {"reasoning_text": expected.thinking, "output_text": expected.text}
    assert events[-1].response.usage.output_tokens_details.reasoning_tokens == 16


def test_reasoning_that_is_sent_back_reaches_a_template_that_reads_it(
    server: Any, use: Any, client: openai.OpenAI
) -> None:
    def prompt_tokens(*turns: Any) -> int:
        last = {"role": "user", "content": "And 3?"}
        options: Any = {"model": "tiny", "max_tokens": 1}
        chat = client.chat.completions.create(messages=[*turns, last], **options).usage.prompt_tokens
        items = []
        for turn in turns:
            if thinking := turn.get("reasoning_content") or turn.get("reasoning"):
                part = {"type": "reasoning_text", "text": thinking}
                items.append({"type": "reasoning", "id": "r", "summary": [], "content": [part]})
            items.append({name: turn[name] for name in ("role", "content")})
        response = client.responses.create(model="tiny", input=[*items, last], max_output_tokens=1)
        assert response.usage.input_tokens == chat
        return int(chat)

    plain = ({"role": "user", "content": "2?"}, {"role": "assistant", "content": "Prime."})
    thought = (plain[0], {**plain[1], "reasoning_content": "2 = 2 <|im_end|>"})
    assert prompt_tokens(*thought) == prompt_tokens(*plain)
    reads = "{% if m.reasoning_content is string %}<think>{{ m.reasoning_content }}</think>{% endif %}"
    use(server, "{% for m in messages %}" + reads + "{{ m.content }}<|im_end|>\n{% endfor %}")
    assert prompt_tokens(*thought) > prompt_tokens(*plain) + 10
    assert prompt_tokens(plain[0], {**plain[1], "reasoning": thought[1]["reasoning_content"]}) == prompt_tokens(
        *thought
    )
