"""Sampling in numpy: the reference of sampling.c, and the implementation without a C compiler.

The noise, the filters and the order of ties are the same as in C.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from tot.decoders.engine.sampling import (
    MIN_TEMPERATURE,
    Draw,
    Raw,
    clamped_temperature,
    has_filters,
    hashed,
    log_of,
    noise_key,
)
from tot.decoders.models.shapes import Array

_BITS = 24


def _gaps(keys: Any, hashes: Any) -> Array:
    """Return 24 uniform bits for (key, hashed token id), uint32; shapes broadcast."""
    low, high = (np.asarray(keys).astype(np.uint64) >> np.uint64(shift) for shift in (0, 32))
    words: Array = hashed(np.asarray(hashes, np.uint32) ^ low.astype(np.uint32)) ^ high.astype(np.uint32)
    words *= np.uint32(0x9E3779B9)
    gaps: Array = (words ^ words >> 15) & np.uint32(2**_BITS - 1)
    return gaps


def gumbel(keys: Any, tokens: Any) -> Array:
    """Gumbel noise in float64 for (key, token id) pairs; `keys` are int64 from `noise_key`, shapes broadcast."""
    gaps = _gaps(keys, hashed(np.asarray(tokens, np.uint32)))
    noise: Array = -np.log(-np.log1p(-(gaps + 0.5) / 2**_BITS))  # -log(-log(u)), u = 1 - (gap + 1/2) / 2^24
    return noise


@np.errstate(invalid="ignore", over="ignore")  # rows may be infinite or NaN
def read(logits: Array, targets: Sequence[Draw | int | Raw]) -> tuple[list[int], list[float]]:
    """Return the token and the log-probability of each row, as `read_rows` in sampling.c."""
    tokens = np.array([target if isinstance(target, int) else 0 for target in targets], np.int64)
    rows = [i for i, target in enumerate(targets) if isinstance(target, Draw)]
    if rows:
        draws = [target for target in targets if isinstance(target, Draw)]
        tokens[rows] = top_tokens(logits[rows], draws, 1)[:, 0].clip(min=0)  # a row of NaN has no best token
    largest = logits.max(-1, keepdims=True)
    normaliser = np.log(np.exp(logits - largest).sum(-1)) + largest[:, 0]
    logprobs = np.take_along_axis(logits, tokens[:, None], 1)[:, 0] - normaliser
    return tokens.tolist(), np.where(np.isfinite(normaliser), logprobs, np.nan).tolist()


def top_tokens(logits: Array, draws: Sequence[Draw], count: int) -> Array:
    """Return the top tokens by filtered logits / T + G, (rows, vocab) -> (rows, count); -1 pads shorter rows."""
    top = np.full((len(logits), count), -1, np.int64)
    for row, (values, draw) in enumerate(zip(logits, draws, strict=True)):
        scores = _scaled(_masked(values, draw), draw).astype(np.float64)
        if clamped_temperature(draw):
            scores += gumbel(noise_key(draw), np.arange(len(scores)))
        best = np.array([scores.argmax()]) if count == 1 else np.argsort(-scores, kind="stable")[:count]
        best = best[scores[best] > -np.inf]  # ties go to the lowest id
        top[row, : len(best)] = best
    return top


def distribution(logits: Array, draw: Draw) -> Array:
    """Return the probability of drawing each token, (vocab,) in float64: masked, after temperature, filtered,
    renormalised."""
    logits = _masked(logits, draw)
    if draw.temperature <= MIN_TEMPERATURE:
        point = np.zeros(len(logits))
        point[logits.argmax()] = 1.0
        return point
    scores = _scaled(logits, draw).astype(np.float64)
    weights = np.exp(scores - scores.max())
    probabilities: Array = weights / weights.sum()
    return probabilities


def _masked(logits: Array, draw: Draw) -> Array:
    """Return a row of logits with -inf for the tokens that the mask forbids."""
    if draw.mask is None:
        return logits
    allowed = np.unpackbits(draw.mask.astype("<u4").view(np.uint8), count=len(logits), bitorder="little")
    masked: Array = np.where(allowed == 1, logits, np.float32(-np.inf))
    return masked


def _scaled(logits: Array, draw: Draw) -> Array:
    """Return a row of logits divided by the temperature and filtered. A row of a greedy draw is unchanged."""
    scaled: Array = logits / np.float32(clamped_temperature(draw) or 1.0)
    return filtered(scaled, draw) if has_filters(draw) else scaled


@np.errstate(invalid="ignore", over="ignore")
def filtered(scaled: Array, draw: Draw) -> Array:
    """Return a row with -inf for the tokens that top-k, top-p and min-p exclude.

    Top-k keeps ties with the k-th token. Top-p then keeps a token while the larger ones (ties: lower ids) have less
    than top_p of the remaining probability. `kept_of` in sampling.c applies the same rules.
    """
    order = np.argsort(-scaled, kind="stable")
    values = scaled[order]
    if 0 < draw.top_k < len(values):
        values[values < values[draw.top_k - 1]] = -np.inf
    weights = _weights(values - values[0])
    excluded = values < values[0] + np.float32(log_of(draw.min_p))  # p < min_p * p_max, in logs
    if draw.top_p < 1:
        excluded |= weights.cumsum() - weights >= draw.top_p * weights.sum()
    values[excluded] = -np.inf
    result = np.empty_like(scaled)
    result[order] = values
    return result


_POWERS_OF_TWO = (1.5252734e-5, 1.5403530e-4, 1.3333558e-3, 9.6181291e-3, 5.5504109e-2, 2.4022651e-1, 6.9314718e-1, 1.0)
"""Polynomial coefficients of 2^x for |x| <= 1/2, accurate to 1e-7."""


def _weights(below: Array) -> Array:
    """Return e^x for x <= 0 in float64, with the operations of `weight` in sampling.c.

    Results are multiples of 2^-35, so sums are exact in any order.
    """
    scaled = np.maximum(below * np.float32(1.44269504), np.float32(-126))
    shifted = scaled + np.float32(12582912)
    rest = scaled - (shifted - np.float32(12582912))
    power = np.full_like(rest, _POWERS_OF_TWO[0])
    for factor in _POWERS_OF_TWO[1:]:
        power = power * rest + np.float32(factor)
    power *= ((shifted.view(np.int32) - 0x4B400000 + 127) << 23).view(np.float32)
    weights: Array = ((power + np.float32(2**-12)) - np.float32(2**-12)).astype(np.float64)
    return weights
