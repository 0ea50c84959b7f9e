"""Jacobi decoding: the tokens of `ar` in no more forwards, along trajectories that satisfy equation 3."""

from __future__ import annotations

import copy
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch

from tot.decoders import Completion, LocalDecoder, Request, Sampling
from tot.decoders.drafting.latency_model import LatencyModel

LONG = "The sum of 10 and 11 is in the range on and on, and the other one: " * 2
Make = Callable[..., LocalDecoder]


def outcomes(completions: list[Completion]) -> list[Any]:
    return [(c.tokens, c.text, c.finish_reason, c.parts) for c in completions]


@pytest.mark.parametrize("n", [1, 5, 64, *(pytest.param(n, marks=pytest.mark.slow) for n in (2, 16))])
@pytest.mark.parametrize("options", [{}, {"adapt": False}])
def test_the_fixed_point_is_the_text_of_ar(make: Make, mixed: list[Request], n: int, options: dict[str, Any]) -> None:
    expected = make("ar").generate(mixed)
    got = make("jacobi", n=n, **options).generate(mixed)
    assert outcomes(got) == outcomes(expected)
    for one in got:
        assert one.usage.forwards <= len(one.tokens) + bool(one.choice_logprobs) + 1
        assert one.usage.accepted <= one.usage.drafted


@pytest.mark.parametrize("heat", [0.0, 1.0])
def test_each_point_follows_from_the_previous_one_by_equation_3(
    make: Make, make_model: Callable[..., Any], logits_alone: Callable[..., torch.Tensor], heat: float
) -> None:
    from tot.decoders.engine.sampling import Draw, read

    decoder = make("jacobi", n=6, adapt=False, trajectory=True)
    request = Request(prompt=LONG, sampling=Sampling(max_tokens=30, temperature=heat, seed=3, ignore_eos=True))
    (got,) = decoder.generate([request])
    plain = copy.deepcopy(decoder.model)
    plain.set_attn_implementation("sdpa")
    prompt = decoder.engine.codec.encode_prompt(LONG)
    assert len(got.trajectory) == got.usage.forwards
    windows = 0
    for (at, guesses), (later, corrected) in pairwise(got.trajectory):
        tokens = [*prompt, *got.tokens[:at], *guesses]
        logits = logits_alone(plain, tokens)[len(prompt) + at - 1 :]
        draws = [Draw(heat, 0, 1.0, 0.0, 3, 0, at + i) for i in range(len(logits))]
        drawn = [sampled.token for sampled in read(logits, draws)]
        assert tuple(drawn[: later - at]) == got.tokens[at:later]
        if later - at < len(guesses):  # otherwise the window converged, and a new one began
            assert corrected == tuple(drawn[later - at : len(guesses)])
            windows += bool(corrected)
    assert windows > 5


def test_a_window_is_shortened_if_that_is_faster(make: Make, script_latency: Callable[..., None]) -> None:
    script_latency(LatencyModel((1, 64), (0.01, 0.011)))
    request = Request(prompt=LONG, sampling=Sampling(max_tokens=120, temperature=1.0, ignore_eos=True, n=8))
    whole = make("jacobi", n=16, adapt=False).generate([request])
    cut = make("jacobi", n=16).generate([request])
    assert outcomes(cut) == outcomes(whole)
    assert sum(one.usage.drafted for one in cut) < 0.7 * sum(one.usage.drafted for one in whole)
