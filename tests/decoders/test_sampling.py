"""Seeded sampling: the right distribution, as a pure function of the logits, the seed, the sample and the position."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import example, given
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
WORD = 2**32


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


def brute_force(logits: Tensor, draws: Sequence[Draw]) -> list[int]:
    """Sample by Gumbel-max over the whole vocabulary."""
    every = np.arange(logits.shape[1])
    tokens = []
    for row, how in zip(logits, draws, strict=True):
        scaled = warped(row[None], how)[0] if how.temperature else row
        noise = gumbel(noise_key(how), every) if how.temperature else 0
        tokens.append(int((scaled.double().numpy() + noise).argmax()))
    return tokens


def tokens(sampled: Sequence[Sampled]) -> list[int]:
    return [one.token for one in sampled]


def mix(word: int) -> int:
    """Apply Murmur3's finaliser with Python integers."""
    word ^= word >> 16
    word = word * 0x85EBCA6B % WORD
    word ^= word >> 13
    word = word * 0xC2B2AE35 % WORD
    return word ^ word >> 16


def gap(key: int, token: int) -> int:
    """Return the noise's 24 bits, hashed with Python integers."""
    word = (mix(mix(token) ^ key % WORD) ^ (key >> 32) % WORD) * 0x9E3779B9 % WORD
    return (word ^ word >> 15) % 2**24


def noise_of(gap: int) -> float:
    return -math.log(-math.log1p(-(gap + 0.5) / 2**24))


def key_of(last: int, token: int) -> int:
    """Return a key for which the 32-bit hash of `token` equals `last`."""
    word = (last ^ last >> 15 ^ last >> 30) * pow(0x9E3779B9, -1, WORD) % WORD
    high = word ^ mix(mix(token))
    return (high << 32) - (2**64 if high >= 2**31 else 0)


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


@given(st.lists(draws, min_size=1, max_size=6), st.integers(0, 1000), st.sampled_from([0.1, 2.0, 30.0]))
@example([draw(sample=i) for i in range(200)], 0, 1.0)
def test_samples_equal_a_gumbel_argmax_over_the_whole_vocabulary(hows: list[Draw], seed: int, spread: float) -> None:
    logits = random_logits(len(hows), seed, spread)
    assert tokens(read(logits, hows)) == brute_force(logits, hows)


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


def test_noise_equals_the_hash_in_python_integers() -> None:
    """A change of the hash changes the result of every seeded run, and must be intentional."""
    keys = [noise_key(draw(seed=s)) for s in (0, 1, 2**64 - 1)] + [-1, 0, 2**63 - 1, -(2**63)]
    ids = [0, 1, 255, 151_935, 262_143]
    noise = gumbel(np.array(keys)[:, None], np.array(ids)[None])
    expected = [[noise_of(gap(key, token)) for token in ids] for key in keys]
    np.testing.assert_allclose(noise, expected, rtol=1e-12)
    assert noise_key(draw(seed=5, sample=6, position=7)) == 8461057289272665152


@pytest.mark.parametrize("margin", [1e-4, -1e-4])
def test_the_least_likely_token_that_can_win_still_wins(monkeypatch: pytest.MonkeyPatch, margin: float) -> None:
    key = key_of(0, token=1)  # under this key, token 1 has the largest possible noise
    monkeypatch.setattr(sampling, "noise_key", lambda _: key)
    noise = gumbel(key, np.arange(2))
    lead = float(noise[1] - noise[0]) - margin
    assert lead > 10
    assert read(torch.tensor([[lead, 0.0]]), [draw()])[0].token == (1 if margin > 0 else 0)


def test_logprob_is_log_softmax_of_the_unmodified_logits() -> None:
    logits = random_logits(5)
    reads: list[sampling.Read] = [draw(0.0), draw(0.5, top_k=2), 7, draw(2.0, min_p=0.2), 0]
    got = read(logits, reads)
    assert [got[2].token, got[4].token] == [7, 0]
    expected = logits.log_softmax(-1)[range(5), tokens(got)]
    assert [one.logprob for one in got] == pytest.approx(expected.tolist(), abs=1e-6)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_row_that_is_not_finite_gives_nan_and_affects_no_other(bad: float) -> None:
    logits = random_logits(6)
    reads: list[sampling.Read] = [draw(), draw(0.0), 3, draw(), draw(0.0), 3]
    clean = read(logits, reads)
    logits[:3, 5] = bad
    got = read(logits, reads)
    assert all(math.isnan(one.logprob) for one in got[:3])
    assert got[3:] == clean[3:]


def test_tokens_of_minus_infinity_are_never_sampled() -> None:
    logits = torch.full((300, 8), -torch.inf)
    logits[:, 2] = logits[:, 6] = 0.0
    got = read(logits, [draw(sample=i) for i in range(300)])
    assert set(tokens(got)) == {2, 6}
    assert [one.logprob for one in got] == pytest.approx([-math.log(2)] * 300)


def test_ties_go_to_the_lowest_id(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = torch.tensor([[0.0, 3.0, 1.0, 3.0, 3.0], [2.0, 2.0, 2.0, 2.0, 2.0]])
    assert tokens(read(logits, [draw(0.0)] * 2)) == [1, 0]
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
    logits = random_logits(4, 1, spread, vocabulary)
    logits[1, : vocabulary // 2] = -math.inf
    given = [vocabulary - 1, vocabulary // 2, 0, vocabulary // 3]
    expected = logits.double().log_softmax(-1).gather(1, torch.tensor(given)[:, None])[:, 0]
    found = [one.logprob for one in read(logits, given)]
    np.testing.assert_allclose(found, expected.tolist(), rtol=1e-6, atol=2e-6)
