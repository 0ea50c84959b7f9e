"""Filters leave the same tokens in C, in numpy and by definition, also with ties and infinities."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor

from tot.decoders.engine import sampling, sampling_reference
from tot.decoders.engine.sampling import Draw, candidates, distribution, noise_key, read
from tot.decoders.engine.sampling_reference import gumbel

draws = st.builds(
    Draw,
    st.sampled_from([0.1, 0.7, 1.0, 1.5, 20.0, 1e38]),
    st.sampled_from([0, 0, 1, 2, 40, 300, 10**30]),
    st.sampled_from([1.0, 0.9999999, 0.95, 0.5, 0.01, 1e-9]),
    st.sampled_from([0.0, 0.0, 0.05, 0.5, 1.0]),
    st.integers(0, 2**64 - 1),
    st.integers(0, 100),
    st.integers(0, 5000),
    mask=st.none(),
)
shapes = st.sampled_from(["plain", "ties", "bfloat16", "equal", "wide", "masked", "nothing"])


def row_of(shape: str, vocab: int, seed: int) -> Tensor:
    row = torch.randn(vocab, generator=torch.Generator().manual_seed(seed)) * 3
    if shape == "ties":
        row = row.round()
    elif shape == "bfloat16":
        row = row.bfloat16().float()
    elif shape == "equal":
        row[:] = -0.0
        row[::2] = 0.0
    elif shape == "wide":
        row *= 1e4
    elif shape == "masked":
        row[::3] = -math.inf
    elif shape == "nothing":
        row[:] = -math.inf
    return row


def remaining(row: Tensor, how: Draw) -> list[int]:
    """Apply the definition with a sort: the remaining tokens, the most likely first, the lower id first among
    equals."""
    scaled = (row / torch.tensor(how.temperature)).tolist()
    left = sorted((token for token, score in enumerate(scaled) if score > -math.inf), key=lambda t: (-scaled[t], t))
    if how.top_k:
        left = [token for token in left if scaled[token] >= scaled[left[min(how.top_k, len(left)) - 1]]]
    weights = [math.exp(scaled[token] - scaled[left[0]]) for token in left]
    if how.top_p < 1:
        total, before, count = math.fsum(weights), 0.0, 0
        while count < len(left) and before < how.top_p * total:
            before += weights[count]
            count += 1
        left = left[:count]
    if how.min_p:
        threshold = torch.tensor(scaled[left[0]]) + math.log(how.min_p) if left else 0
        left = [token for token in left if scaled[token] >= threshold]
    return left


def sampled(rows: Tensor, hows: Sequence[Draw]) -> tuple[list[int], list[list[int]]]:
    return [one.token for one in read(rows, hows)], candidates(rows, hows, 6)


@pytest.mark.parametrize("language", ["c", "numpy"])
@given(
    st.lists(st.tuples(draws, shapes), min_size=1, max_size=5),
    st.sampled_from([1, 2, 31, 32, 33, 400, 3001]),
    st.integers(0, 10**6),
)
@example([(Draw(1.0, 0, 0.5, 0.0, 0, 0, 0), "equal")], 400, 0)
def test_the_sample_is_the_best_of_the_tokens_left_by_a_sort(
    language: str, rows: list[tuple[Draw, str]], vocab: int, seed: int
) -> None:
    hows = [how for how, _ in rows]
    logits = torch.stack([row_of(shape, vocab, seed + i) for i, (_, shape) in enumerate(rows)])
    expected = []
    for row, how in zip(logits, hows, strict=True):
        left = np.array(remaining(row, how), dtype=np.int64)
        scores = (row / torch.tensor(how.temperature)).numpy()[left].astype(float) + gumbel(noise_key(how), left)
        order = sorted(range(len(left)), key=lambda i: (-float(scores[i]), int(left[i])))
        expected.append([int(left[i]) for i in order[:6]])
    with pytest.MonkeyPatch.context() as patch:
        if language == "numpy":
            patch.setattr(sampling, "_compiled", lambda: None)
        assert sampled(logits, hows) == ([first[0] if first else 0 for first in expected], expected)


@pytest.mark.parametrize("vocab", [49_152, 151_936])
@pytest.mark.parametrize("spread", [0.3, 3.0])
def test_a_large_vocabulary_is_filtered_the_same_in_c_and_numpy(
    vocab: int, spread: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    if sampling._compiled() is None:
        pytest.skip("needs a C compiler")
    hows = [
        Draw(temperature, top_k, top_p, 0.0, 1, 0, position)
        for position in range(2)
        for temperature in (0.5, 1.0)
        for top_k, top_p in ((0, 0.95), (40, 1.0), (40, 0.95), (5000, 1.0))
    ]
    generator = torch.Generator().manual_seed(vocab)
    logits = (torch.randn(len(hows), vocab, generator=generator) * spread).bfloat16().float()  # so that many are equal
    found = sampled(logits, hows)
    monkeypatch.setattr(sampling, "_compiled", lambda: None)
    assert sampled(logits, hows) == found


@given(draws, shapes.filter(lambda shape: shape != "nothing"), st.integers(0, 10**6))
def test_a_distribution_covers_exactly_the_tokens_that_can_be_sampled(how: Draw, shape: str, seed: int) -> None:
    row = row_of(shape, 300, seed)
    probabilities = distribution(row, how)
    assert float(probabilities.sum()) == pytest.approx(1.0)
    assert probabilities.nonzero()[0].tolist() == sorted(
        token for token in remaining(row, how) if float(probabilities[token]) > 0
    )
    assert set(candidates(row[None], [how], 300)[0]) == set(remaining(row, how))


def test_sums_of_weights_are_exact_and_independent_of_order() -> None:
    below = -np.random.default_rng(0).random(200_000, np.float32) * 30
    weights = sampling_reference._weights(below)
    sums = [weights.sum(), weights[::-1].sum(), weights.cumsum()[-1], weights.reshape(400, -1).sum(0).sum()]
    assert {float(total) for total in sums} == {math.fsum(weights.tolist())}
    np.testing.assert_allclose(weights, np.exp(below.astype(float)), rtol=3e-6, atol=2.0**-35)
