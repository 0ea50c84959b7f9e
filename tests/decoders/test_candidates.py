"""Candidates: the tokens with the highest filtered logits / T + noise, in order, with `read`'s token first."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tot.decoders.engine.sampling import Draw, candidates, noise_key, read
from tot.decoders.engine.sampling_reference import filtered, gumbel


def draw(
    temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0, seed: int = 0, position: int = 0
) -> Draw:
    return Draw(temperature, top_k, top_p, min_p, seed, 0, position)


def random_logits(rows: int, vocab: int, seed: int, spread: float) -> Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * spread


def ranked(row: Tensor, how: Draw) -> list[int]:
    """Return all tokens that pass the filters, best first, and the lowest id first among equals."""
    if not how.temperature:
        return sorted(range(len(row)), key=lambda token: (-float(row[token]), token))
    scaled = filtered((row / torch.tensor(how.temperature)).numpy(), how)
    scores = scaled.astype(float) + gumbel(noise_key(how), np.arange(len(row)))
    left = [token for token in range(len(row)) if scores[token] > -np.inf]
    return sorted(left, key=lambda token: (-float(scores[token]), token))


draws = st.builds(
    draw,
    st.sampled_from([0.0, 0.3, 1.0, 2.0]),
    st.sampled_from([0, 0, 1, 3, 20]),
    st.sampled_from([1.0, 1.0, 0.9, 0.3]),
    st.sampled_from([0.0, 0.0, 0.05, 0.7]),
    st.integers(0, 2**64 - 1),
    st.integers(0, 1000),
)


@given(
    st.lists(draws, min_size=1, max_size=4),
    st.sampled_from([1, 2, 5, 40, 400]),
    st.integers(0, 2**31),
    st.sampled_from([0.0, 0.5, 3.0, 12.0]),
    st.integers(1, 5),
)
def test_candidates_are_the_first_of_the_full_ranking(
    draws: list[Draw], vocab: int, seed: int, spread: float, count: int
) -> None:
    logits = random_logits(len(draws), vocab, seed, spread)
    expected = [ranked(row, how)[:count] for row, how in zip(logits, draws, strict=True)]
    assert candidates(logits, draws, count) == expected


@given(st.lists(draws, min_size=1, max_size=4), st.integers(0, 2**31), st.integers(1, 5))
def test_the_first_candidate_is_the_token_that_would_be_sampled(draws: list[Draw], seed: int, count: int) -> None:
    logits = random_logits(len(draws), 60, seed, 2.0)
    first = [tokens[0] for tokens in candidates(logits, draws, count)]
    assert first == [sampled.token for sampled in read(logits, draws)]


@pytest.mark.parametrize(
    ("how", "left"), [(draw(top_k=2), 2), (draw(top_p=0.5), 1), (draw(min_p=0.2), 2), (draw(top_k=3, top_p=0.9), 2)]
)
def test_filters_reduce_the_number_of_candidates(how: Draw, left: int) -> None:
    logits = torch.tensor([[0.6, 0.3, 0.07, 0.02, 0.01]]).log()
    (tokens,) = candidates(logits, [how], 5)
    assert sorted(tokens) == list(range(left))


def test_a_token_without_probability_is_not_a_candidate_when_sampling() -> None:
    logits = torch.tensor([[-torch.inf, 1.0, -torch.inf, 0.0]])
    (tokens,) = candidates(logits, [draw(seed=1)], 4)
    assert sorted(tokens) == [1, 3]


@pytest.mark.parametrize("count", [1, 2, 3])
def test_ties_at_temperature_zero_go_to_the_lowest_ids(count: int) -> None:
    logits = torch.tensor([[0.0, 2.0, 1.0, 2.0, 2.0]])
    assert candidates(logits, [draw(0.0)], count) == [[1, 3, 4][:count]]
