"""Lookahead decoding: the tokens of `ar`, and fewer forwards by n-grams of the target's own guesses."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

from tot.decoders import Completion, LocalDecoder, Request, Sampling

LONG = "The sum of 10 and 11 is in the range on and on, and the other one: " * 2
Make = Callable[..., LocalDecoder]


def outcomes(completions: list[Completion]) -> list[Any]:
    return [(c.tokens, c.text, c.finish_reason, c.parts) for c in completions]


@pytest.mark.parametrize("make", ["llama", pytest.param("qwen2", marks=pytest.mark.slow)], indirect=True)
@pytest.mark.parametrize("adapt", [False, True])
@pytest.mark.parametrize(("window", "ngram", "guesses"), [(1, 2, 1), (15, 5, 15), (3, 8, 3)])
def test_the_text_equals_ar(
    make: Make, mixed: list[Request], window: int, ngram: int, guesses: int, adapt: bool
) -> None:
    expected = make("ar").generate(mixed)
    decoder = make("lookahead", window=window, ngram=ngram, guesses=guesses, adapt=adapt, kv_budget=20_000)
    for _ in range(2):  # the second time with a filled pool
        assert outcomes(decoder.generate(mixed)) == outcomes(expected)


def test_the_end_of_the_context_is_handled(make: Make) -> None:
    prompt = tuple(random.Random(0).choices(range(3, 270), k=1000))
    request = Request(prompt=prompt, sampling=Sampling(max_tokens=100, ignore_eos=True))
    expected = make("ar").generate([request])
    got = make("lookahead", window=9, ngram=4, adapt=False).generate([request])
    assert outcomes(got) == outcomes(expected)
    assert got[0].finish_reason == "length"


def test_a_looping_text_takes_fewer_forwards(make: Make) -> None:
    """The next token depends only on the last one, so guessed n-grams are right wherever their first token recurs."""
    decoder = make("lookahead", window=6, ngram=4, guesses=4, adapt=False)
    for layer in decoder.model.model.layers:
        layer.self_attn.o_proj.weight.data.zero_()
    request = Request(prompt=LONG, sampling=Sampling(max_tokens=120, ignore_eos=True, stop=()))
    (got,) = decoder.generate([request])
    assert got.usage.forwards < 0.6 * len(got.tokens)
    assert got.usage.forwards == len(got.tokens) - got.usage.accepted


def test_windows_that_do_not_pay_are_not_iterated(make: Make) -> None:
    request = Request(prompt=LONG, sampling=Sampling(max_tokens=100, temperature=1.0, ignore_eos=True, n=8))
    decoder = make("lookahead", window=32, ngram=5, guesses=15, kv_budget=20_000)
    rows = []
    forward = decoder.engine.runner.backend.forward

    def counted(tokens: Any, *rest: Any) -> Any:
        rows.append(tokens.shape[1])
        return forward(tokens, *rest)

    decoder.engine.runner.backend.forward = counted  # type: ignore[method-assign]
    decoder.generate([request])
    assert sorted(rows)[len(rows) // 2] < 8 * 32
