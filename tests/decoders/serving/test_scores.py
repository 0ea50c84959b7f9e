"""Log-probabilities equal the unmodified model's for the same tokens, and are refused where they do not exist."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import openai
import pytest
import torch
from torch import Tensor

from tot.decoders import Message, Request, Sampling


@pytest.fixture
def logprobs(tiny: Callable[..., Any]) -> Callable[[list[int]], Tensor]:
    """Return (tokens, vocab) log-probabilities after each token of a text, run alone and whole."""
    decoder = tiny()
    decoder.close()  # restores the model's own attention

    def run(ids: list[int]) -> Tensor:
        with torch.inference_mode():
            logits: Tensor = decoder.model(torch.tensor([ids]), use_cache=False).logits[0].float()
        return logits.log_softmax(-1)

    return run


LONG = "A text that takes more than one chunk of rows to be scored whole, as it has many tokens: a byte each. " * 3


@pytest.mark.parametrize("text", ["ab", "The sum of 10 and 11", LONG])
def test_echo_without_new_tokens_scores_the_prompt(
    server: Any, client: openai.OpenAI, logprobs: Callable[[list[int]], Tensor], text: str
) -> None:
    ids = server.decoder.engine.codec.encode_prompt(text)
    expected = logprobs(ids)[:-1]
    for prompt in (text, ids):
        reply = client.completions.create(model="tiny", prompt=prompt, echo=True, max_tokens=0, logprobs=0)
        (choice,) = reply.choices
        assert (choice.text, choice.finish_reason) == (text, "length")
        scores = choice.logprobs
        assert (scores.tokens, scores.text_offset) == (list(text), list(range(len(text))))
        assert scores.token_logprobs[0] is None
        assert scores.token_logprobs[1:] == pytest.approx(expected[range(len(ids) - 1), ids[1:]].tolist(), abs=1e-4)
        assert scores.top_logprobs is None
        assert (reply.usage.completion_tokens, reply.usage.prompt_tokens) == (0, len(ids))
    top = client.completions.create(model="tiny", prompt=text, echo=True, max_tokens=0, logprobs=2).choices[0].logprobs
    assert top.token_logprobs[1:] == pytest.approx(scores.token_logprobs[1:], abs=1e-4)
    assert top.top_logprobs[0] is None
    best = expected.topk(2)
    for alternatives, values, token in zip(top.top_logprobs[1:], best.values.tolist(), top.tokens[1:], strict=True):
        found = sorted(alternatives.values(), reverse=True)
        assert found[:2] == pytest.approx(sorted(values, reverse=True), abs=1e-4)
        assert token in alternatives  # also if it is not one of the best
        assert len(alternatives) == 2 + (alternatives[token] < found[1])


def test_several_prompts_are_scored_at_once(client: openai.OpenAI) -> None:
    options = {"model": "tiny", "echo": True, "max_tokens": 0, "logprobs": 0}
    texts = ["The sum of 10", "of 11", "x"]
    together = client.completions.create(prompt=texts, **options)
    alone = [client.completions.create(prompt=text, **options).choices[0].logprobs for text in texts]
    assert [choice.text for choice in together.choices] == texts
    for choice, one in zip(together.choices, alone, strict=True):
        assert choice.logprobs.token_logprobs[1:] == pytest.approx(one.token_logprobs[1:], abs=1e-4)
    assert together.choices[2].logprobs.token_logprobs == [None]


def test_sampled_tokens_have_the_models_log_probabilities(
    server: Any, client: openai.OpenAI, logprobs: Callable[[list[int]], Tensor], says: Any
) -> None:
    sampling = {"temperature": 1.3, "max_tokens": 12, "seed": 2}
    request = Request(prompt=(Message(role="user", content="Hm."),), sampling=Sampling(n=2, **sampling))
    expected = server.decoder.generate([request])
    reply = client.chat.completions.create(
        model="tiny:seed", messages=says("Hm."), n=2, logprobs=True, top_logprobs=3, **sampling
    )
    prompt = server.decoder.engine.codec.encode_prompt(request.prompt)
    for choice, local in zip(reply.choices, expected, strict=True):
        assert choice.message.content == local.text
        scores = [token.logprob for token in choice.logprobs.content]
        assert sum(scores) == pytest.approx(local.logprob, abs=1e-3)
        rows = logprobs([*prompt, *local.tokens])[len(prompt) - 1 : -1]
        assert scores == pytest.approx(rows[range(len(local.tokens)), list(local.tokens)].tolist(), abs=1e-4)
        for token, best in zip(choice.logprobs.content, rows.topk(3).values.tolist(), strict=True):
            assert [one.logprob for one in token.top_logprobs[:3]] == pytest.approx(best, abs=1e-4)
            (own,) = [
                one for one in token.top_logprobs if one.token == token.token
            ]  # also if it is not one of the best
            assert own.logprob == token.logprob
            assert len(token.top_logprobs) == 3 + (own is token.top_logprobs[-1] and own.logprob < best[-1] - 1e-4)
        spelled = b"".join(bytes(token.bytes) for token in choice.logprobs.content)
        assert spelled.decode("utf-8", "replace").startswith(choice.message.content)


def test_text_completions_have_log_probabilities_after_an_echo_too(server: Any, client: openai.OpenAI) -> None:
    request = {"model": "tiny", "prompt": "Once", "max_tokens": 5, "seed": 1}
    (plain,) = client.completions.create(logprobs=0, **request).choices
    (echoed,) = client.completions.create(logprobs=0, echo=True, **request).choices
    assert echoed.text == "Once" + plain.text
    assert len(plain.logprobs.tokens) == len(plain.logprobs.token_logprobs) <= 5
    assert echoed.logprobs.tokens == [*"Once", *plain.logprobs.tokens]
    assert echoed.logprobs.token_logprobs[4:] == pytest.approx(plain.logprobs.token_logprobs, abs=1e-4)


@pytest.mark.parametrize("close", [False, True])
def test_choices_get_the_local_decoders_scores(server: Any, client: openai.OpenAI, says: Any, close: bool) -> None:
    choices = ("1", "10", "no")
    request = Request(prompt=(Message(role="user", content="5 + 5?"),), choices=choices, close_choices=close)
    expected = server.decoder.generate([request])[0].choice_logprobs
    extra = {"choices": choices, "close_choices": close}
    reply = client.chat.completions.create(model="tiny", messages=says("5 + 5?"), extra_body=extra)
    scores = reply.choices[0].choice_logprobs
    assert [one["tokens"] for one in scores] == [one.tokens for one in expected]
    assert [one["total"] for one in scores] == pytest.approx([one.total for one in expected], abs=1e-4)
    assert reply.choices[0].message.content == ""


def test_log_probabilities_that_do_not_exist_are_refused(client: openai.OpenAI, says: Any) -> None:
    request: dict[str, Any] = {"messages": says("Hm."), "logprobs": True}
    for model, more, param in (
        ("tiny:pdos", {}, "logprobs"),
        ("tiny", {"stream": True}, "stream"),
        ("tiny", {"extra_body": {"choices": ["a"]}}, "logprobs"),
    ):
        with pytest.raises(openai.BadRequestError) as refused:
            client.chat.completions.create(model=model, **request, **more)
        assert refused.value.param == param
