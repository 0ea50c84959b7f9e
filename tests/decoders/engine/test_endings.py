"""The engine: the end of a text by end tokens, stop strings, context length and budgets."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

from tot.decoders import Budget, LocalDecoder, Meter, Request, Sampling

END = 2
Serve = Callable[..., LocalDecoder]


# -- ends of a text ----------------------------------------------------------------------------------


def test_an_end_token_ends_a_text_unless_ignored(helpers: Any, decoder: LocalDecoder) -> None:
    ended = helpers.greedy(decoder, max_tokens=200)
    assert (ended.finish_reason, ended.tokens[-1]) == ("eos", END)
    assert "<|im_end|>" not in ended.text
    longer = helpers.greedy(decoder, max_tokens=len(ended.tokens) + 5, ignore_eos=True)
    assert (longer.finish_reason, len(longer.tokens)) == ("length", len(ended.tokens) + 5)
    assert longer.tokens[: len(ended.tokens)] == ended.tokens
    assert longer.text.startswith(ended.text)


def test_every_end_token_of_the_generation_config_counts(helpers: Any, model: Any, serve: Serve) -> None:
    tokens = helpers.greedy(serve(), max_tokens=8).tokens
    model.generation_config.eos_token_id = [END, tokens[5]]
    cut = helpers.greedy(serve(model), max_tokens=8)
    assert (cut.tokens, cut.finish_reason) == (tokens[: tokens.index(tokens[5]) + 1], "eos")


def test_the_context_limits_a_text(decoder: LocalDecoder) -> None:
    prompt = tuple(random.Random(0).choices(range(3, 270), k=1000))
    sampling = Sampling(max_tokens=100, ignore_eos=True)
    (completion,) = decoder.generate([Request(prompt=prompt, sampling=sampling)])
    assert (len(completion.tokens), completion.finish_reason) == (24, "length")


# -- budgets -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("budget", "tokens"),
    [(Budget(tokens=5), 5), (Budget(forwards=3), 3), (Budget(seconds=0), 0), (Budget(tokens=0), 0)],
)
def test_a_reached_budget_ends_a_text(decoder: LocalDecoder, budget: Budget, tokens: int) -> None:
    meter = Meter(budget)
    sampling = Sampling(max_tokens=50, ignore_eos=True)
    requests = [Request(prompt="abc", sampling=sampling)]
    (metered,) = decoder.submit(requests, meter)
    free = decoder.generate(requests)[0]
    (completion,) = metered.result(30)
    assert (completion.finish_reason, len(completion.tokens)) == ("budget", tokens)
    assert completion.tokens == free.tokens[:tokens]
    assert completion.text == decoder.engine.codec.decode(completion.tokens)
    assert (meter.new_tokens, meter.forwards) == (tokens, tokens)
    assert len(free.tokens) == 50
