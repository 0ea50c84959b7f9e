"""Seeded sampling: the right distribution, as a pure function of the logits, the seed, the sample and the position."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from tot.decoders.engine import sampling, sampling_reference
from tot.decoders.engine.sampling import Draw, Sampled, candidates, noise_key, read
from tot.decoders.engine.sampling_reference import gumbel

VOCAB = 40


def draw(
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    seed: int = 0,
    sample: int = 0,
    position: int = 0,
) -> Draw:
    return Draw(temperature, top_k, top_p, min_p, seed, sample, position)


def random_logits(rows: int, seed: int = 0, spread: float = 2.0, vocab: int = VOCAB) -> Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * spread


def warped(logits: Tensor, how: Draw) -> Tensor:
    """Apply transformers' logits warpers."""
    steps = LogitsProcessorList([TemperatureLogitsWarper(how.temperature)])
    if how.top_k:
        steps.append(TopKLogitsWarper(how.top_k))
    if how.top_p < 1:
        steps.append(TopPLogitsWarper(how.top_p))
    if how.min_p:
        steps.append(MinPLogitsWarper(how.min_p))
    result: Tensor = steps(None, logits)
    return result


def tokens(sampled: Sequence[Sampled]) -> list[int]:
    return [one.token for one in sampled]


def noise_of(bits: int) -> float:
    """Return the noise of 24 random bits."""
    return -math.log(-math.log1p(-(bits + 0.5) / 2**24))


HASHES = {
    0: [0, 7580851, 11684859, 14935243, 8278161],
    -1: [8300522, 3060809, 7728791, 6275549, 2309638],
    2**63 - 1: [8366058, 3126345, 7663255, 6210013, 2244102],
    -(2**63): [65536, 7515315, 11750395, 14869707, 8343697],
    2891389769238885931: [3595445, 9962630, 4603333, 16718212, 8820830],
}
"""By key: the 24 bits of the tokens 0, 1, 255, 151935 and 262143."""


draws = st.builds(
    draw,
    temperature=st.sampled_from([0.0, 0.01, 0.3, 0.7, 1.0, 1.5, 20.0]),
    top_k=st.sampled_from([0, 1, 5, VOCAB, 10 * VOCAB]),
    top_p=st.sampled_from([0.01, 0.5, 0.9, 1.0]),
    min_p=st.sampled_from([0.0, 0.05, 0.5, 1.0]),
    seed=st.integers(0, 2**64 - 1),
    sample=st.integers(0, 100),
    position=st.integers(0, 5000),
)


@given(st.lists(draws | st.integers(0, VOCAB - 1), min_size=1, max_size=8), st.randoms(use_true_random=False))
def test_a_token_does_not_depend_on_its_batch(reads: list[sampling.Read], random: object) -> None:
    logits = random_logits(len(reads), len(reads))
    alone = [read(logits[i : i + 1], [want])[0] for i, want in enumerate(reads)]
    order = list(range(len(reads)))
    random.shuffle(order)  # type: ignore[attr-defined]
    packed = read(logits[order], [reads[i] for i in order])
    assert tokens(packed) == [alone[i].token for i in order]
    assert [one.logprob for one in packed] == pytest.approx([alone[i].logprob for i in order], abs=1e-5)


def test_seed_sample_and_position_each_change_the_draw() -> None:
    logits = torch.zeros(1, 1000)
    base = draw(seed=1, sample=2, position=3)
    changed = [
        base,
        base._replace(seed=2),
        base._replace(sample=1),
        base._replace(position=2),
        base._replace(seed=2, sample=1),
        base._replace(seed=3, position=1),
        base._replace(sample=3, position=2),
    ]
    drawn = [read(logits, [how])[0].token for how in changed]
    assert len(set(drawn)) == len(changed)
    assert len({noise_key(how) for how in changed}) == len(changed)


def frequencies(logits: Tensor, hows: Sequence[Draw]) -> np.ndarray:
    drawn = tokens(read(logits.expand(len(hows), -1), hows))
    return np.bincount(drawn, minlength=logits.shape[1])


def p_value(counts: np.ndarray, probabilities: Tensor) -> float:
    """Return the p-value of a chi-square test. Rare tokens (expected below five) form one bin, and impossible ones give
    0."""
    p = probabilities.double().numpy()
    if counts[p == 0].any():
        return 0.0
    expected = p / p.sum() * counts.sum()
    common = expected >= 5
    observed = np.append(counts[common], counts[~common].sum())
    expected = np.append(expected[common], expected[~common].sum())
    nonempty = expected > 0
    return float(stats.chisquare(observed[nonempty], expected[nonempty]).pvalue)


@pytest.mark.parametrize(
    "how",
    [
        draw(),
        draw(temperature=0.7),
        draw(top_k=5),
        draw(top_p=0.8),
        draw(min_p=0.1),
        draw(temperature=1.3, top_k=12, top_p=0.9, min_p=0.03),
    ],
    ids=["T=1", "T=0.7", "top_k", "top_p", "min_p", "all"],
)
def test_token_frequencies_follow_softmax(how: Draw) -> None:
    logits = random_logits(1, seed=3)
    counts = frequencies(logits, [how._replace(sample=i) for i in range(20_000)])
    assert p_value(counts, warped(logits, how).softmax(-1)[0]) > 1e-3
    other = how._replace(temperature=how.temperature * 1.1, top_k=0, top_p=1.0, min_p=0.0)
    assert p_value(counts, warped(logits, other).softmax(-1)[0]) < 1e-3  # ten per cent of temperature are detected


def uniforms(hows: Sequence[Draw], ids: np.ndarray) -> np.ndarray:
    """Return the uniforms behind the noise: (draws, ids)."""
    keys = np.array([noise_key(how) for how in hows])
    return np.exp(-np.exp(-gumbel(keys[:, None], ids[None])))


@pytest.mark.parametrize("axis", ["token", "position", "sample", "seed"])
def test_noise_is_uniform_and_neighbours_are_uncorrelated(axis: str) -> None:
    few, many = 4, 25_000
    if axis == "token":
        grid = uniforms([draw(seed=s) for s in range(few)], np.arange(many))
    else:
        grid = uniforms([draw()._replace(**{axis: i}) for i in range(many)], np.arange(few)).T
    for row in grid:
        assert stats.kstest(row, "uniform").pvalue > 1e-3
        assert stats.chisquare(np.bincount((row * 256).astype(int), minlength=256)).pvalue > 1e-3
    limit = 4.5 / math.sqrt(many)
    for lag in (1, 2, 3, 16, 256):
        assert np.abs([np.corrcoef(row[lag:], row[:-lag])[0, 1] for row in grid]).max() < limit
    assert np.abs(np.corrcoef(grid) - np.eye(few)).max() < limit


def test_noise_is_the_same_in_all_versions() -> None:
    """A change of the hash changes the result of every seeded run, and must be intentional."""
    noise = gumbel(np.array([*HASHES])[:, None], np.array([0, 1, 255, 151_935, 262_143])[None])
    expected = [[noise_of(bits) for bits in row] for row in HASHES.values()]
    np.testing.assert_allclose(noise, expected, rtol=1e-12)
    assert noise_key(draw(seed=0)) == 2891389769238885931
    assert noise_key(draw(seed=5, sample=6, position=7)) == 8461057289272665152


@pytest.mark.parametrize("margin", [1e-4, -1e-4])
def test_the_least_likely_token_that_can_win_still_wins(monkeypatch: pytest.MonkeyPatch, margin: float) -> None:
    key = 3454081208466538496  # under this key, token 1 has the largest possible noise
    monkeypatch.setattr(sampling, "noise_key", lambda _: key)
    noise = gumbel(key, np.arange(2))
    lead = float(noise[1] - noise[0]) - margin
    assert lead > 10
    assert read(torch.tensor([[lead, 0.0]]), [draw()])[0].token == (1 if margin > 0 else 0)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_row_that_is_not_finite_gives_nan_and_affects_no_other(bad: float) -> None:
    logits = random_logits(6)
    reads: list[sampling.Read] = [draw(), draw(0.0), 3, draw(), draw(0.0), 3]
    clean = read(logits, reads)
    logits[:3, 5] = bad
    got = read(logits, reads)
    assert all(math.isnan(one.logprob) for one in got[:3])
    assert got[3:] == clean[3:]


def test_ties_go_to_the_lowest_id(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = torch.tensor([[0.0, 3.0, 1.0, 3.0, 3.0], [2.0, 2.0, 2.0, 2.0, 2.0]])
    assert tokens(read(logits, [draw(0.0)] * 2)) == [1, 0]
    assert candidates(logits, [draw(0.0)] * 2, 3) == [[1, 3, 4], [0, 1, 2]]
    monkeypatch.setattr(sampling, "_compiled", lambda: None)
    monkeypatch.setattr(sampling_reference, "_gaps", lambda keys, hashes: np.full(hashes.shape, 9))
    assert tokens(read(logits, [draw()] * 2)) == [1, 0]


# -- in C and in numpy ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("spread", [0.0, 0.01, 1.0, 5.0, 300.0])
@pytest.mark.parametrize("temperature", [0.0, 1e-4, 0.2, 0.7, 1.0, 3.0])
def test_samples_are_the_same_in_c_and_numpy(
    spread: float, temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    if sampling._compiled() is None:
        pytest.skip("needs a C compiler")
    logits = random_logits(6, 3, spread, 5001)
    logits[1, 100:] = -math.inf
    logits[2] = math.nan
    draws = [draw(temperature, seed=row, position=position) for position in range(20) for row in range(6)]
    logits = logits.repeat(20, 1)
    found = [read(logits, draws), candidates(logits, draws, 1), candidates(logits, draws, 5)]
    monkeypatch.setattr(sampling, "_compiled", lambda: None)
    without = [read(logits, draws), candidates(logits, draws, 1), candidates(logits, draws, 5)]
    assert tokens(found[0]) == tokens(without[0])
    assert found[1:] == without[1:]
    assert len({sampled.token for sampled in found[0]}) > 1 or temperature * spread == 0
    np.testing.assert_allclose(
        [s.logprob for s in found[0]], [s.logprob for s in without[0]], rtol=1e-6, atol=2e-6, equal_nan=True
    )


@pytest.mark.parametrize("vocabulary", [1, 15, 16, 17, 255, 256, 257, 4099])
@pytest.mark.parametrize("spread", [0.0, 1.0, 30.0, 1e4, 1e30])
def test_log_probabilities_are_exact(vocabulary: int, spread: float) -> None:
    """They belong to the unmodified logits, for given and for sampled tokens."""
    logits = random_logits(6, 1, spread, vocabulary)
    logits[1, : vocabulary // 2] = -math.inf
    reads = [vocabulary - 1, vocabulary // 2, 0, draw(0.0), draw(0.5, top_k=2), draw(2.0, min_p=0.2)]
    found = read(logits, reads)
    assert tokens(found)[:3] == reads[:3]
    expected = logits.double().log_softmax(-1).gather(1, torch.tensor(tokens(found))[:, None])[:, 0]
    logprobs = [one.logprob for one in found]
    np.testing.assert_allclose(logprobs[:3], expected[:3].tolist(), rtol=1e-6, atol=2e-6)
    np.testing.assert_allclose(logprobs, expected.tolist(), rtol=1e-6, atol=1e-5)
