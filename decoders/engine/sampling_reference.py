"""Sampling in torch: the reference of sampling.c, and the implementation without a C compiler.

The noise, the filters and the order of ties are the same as in C.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tot.decoders.engine.sampling import (
    MIN_TEMPERATURE,
    Draw,
    Raw,
    clamped_temperature,
    has_filters,
    log_of,
    noise_key,
)

_BITS = 24


def _mix(words: Tensor) -> Tensor:
    """Murmur3's finaliser, a bijection of 32-bit words (int32: products wrap, masks make shifts logical)."""
    words = words ^ ((words >> 16) & 0xFFFF)
    words *= -0x7A143595  # 0x85EBCA6B
    words ^= (words >> 13) & 0x7FFFF
    words *= -0x3D4D51CB  # 0xC2B2AE35
    words ^= (words >> 16) & 0xFFFF
    return words


def _gaps(keys: Tensor, hashes: Tensor) -> Tensor:
    """Return 24 uniform bits for (key, hashed token id), int32; shapes broadcast."""
    low, high = keys.to(torch.int32), (keys >> 32).to(torch.int32)
    words = _mix(hashes ^ low)
    words ^= high
    words *= -0x61C88647  # 0x9E3779B9
    gaps: Tensor = (words ^ ((words >> 15) & 0x1FFFF)) & (2**_BITS - 1)
    return gaps


def gumbel(keys: Tensor, tokens: Tensor) -> Tensor:
    """Gumbel noise in float64 for (key, token id) pairs; `keys` are int64 from `noise_key`, shapes broadcast."""
    gaps = _gaps(keys, _mix(tokens.to(torch.int32)))
    return -torch.log(-torch.log1p(-(gaps.double() + 0.5) / 2**_BITS))  # -log(-log(u)), u = 1 - (gap + 1/2) / 2^24


def read(logits: Any, targets: Sequence[Draw | int | Raw]) -> tuple[list[int], list[float]]:
    """Return the token and the log-probability of each row, as `read_rows` in sampling.c."""
    logits = torch.as_tensor(logits)
    given = [target if isinstance(target, int) else 0 for target in targets]
    rows = [i for i, target in enumerate(targets) if isinstance(target, Draw)]
    draws = [target for target in targets if isinstance(target, Draw)]
    tokens = torch.tensor(given, dtype=torch.int64)
    if rows:
        tokens[rows] = top_tokens(logits[rows], draws, 1)[:, 0].clamp_min(0)  # a row of NaN has no best token
    normaliser = torch.logsumexp(logits, dim=-1)
    logprobs = logits.gather(1, tokens[:, None])[:, 0] - normaliser
    logprobs = torch.where(torch.isfinite(normaliser), logprobs, torch.nan)
    return tokens.tolist(), logprobs.tolist()


def top_tokens(logits: Any, draws: Sequence[Draw], count: int) -> Tensor:
    """Return the top tokens by filtered logits / T + G, (rows, vocab) -> (rows, count); -1 pads shorter rows."""
    scores = _prepare(torch.as_tensor(logits), draws).double()
    if drawn := [i for i, draw in enumerate(draws) if clamped_temperature(draw)]:
        keys = torch.tensor([noise_key(draws[i]) for i in drawn], dtype=torch.int64)
        scores[drawn] += gumbel(keys[:, None], torch.arange(scores.shape[1]))
    if count == 1:
        best = scores.argmax(-1, keepdim=True)
    else:
        best = scores.argsort(stable=True, dim=-1, descending=True)[:, :count]  # ties go to the lowest id
    best = torch.where(scores.gather(1, best) > -torch.inf, best, -1)
    return torch.nn.functional.pad(best, (0, count - best.shape[1]), value=-1)


def distribution(logits: Any, draw: Draw) -> Tensor:
    """Return the probability of drawing each token, (vocab,) in float64: after temperature, filtered, renormalised."""
    logits = torch.as_tensor(logits)
    if draw.temperature <= MIN_TEMPERATURE:
        point = torch.zeros_like(logits, dtype=torch.float64)
        point[logits.argmax()] = 1.0
        return point
    return _prepare(logits[None], [draw])[0].double().softmax(-1)


def _prepare(logits: Tensor, draws: Sequence[Draw]) -> Tensor:
    """Return the logits divided by the temperatures and filtered. Rows of greedy draws are unchanged."""
    clamped = [clamped_temperature(draw) or 1.0 for draw in draws]
    scaled = logits / torch.tensor(clamped, dtype=torch.float32)[:, None]
    rows = [i for i, draw in enumerate(draws) if has_filters(draw)]
    if rows:
        scaled[rows] = filtered(scaled[rows], [draws[i] for i in rows])
    return scaled


def filtered(scaled: Tensor, draws: Sequence[Draw]) -> Tensor:
    """Return `scaled` (rows, vocab) with -inf for the tokens that top-k, top-p and min-p exclude.

    Top-k keeps ties with the k-th token. Top-p then keeps a token while the larger ones (ties: lower ids) have less
    than top_p of the remaining probability. `kept_of` in sampling.c applies the same rules.
    """
    vocab = scaled.shape[1]
    limits = torch.tensor(
        [
            [(draw.top_k or vocab) for draw in draws],
            [draw.top_p if draw.top_p < 1 else math.inf for draw in draws],
            [log_of(draw.min_p) for draw in draws],
        ],
        dtype=torch.float64,
    )
    values, order = scaled.sort(descending=True, stable=True, dim=-1)
    last = limits[0].clamp_max(vocab).long() - 1
    values = values.masked_fill(values < values.gather(1, last[:, None]), -torch.inf)
    weights = _weights(values - values[:, :1])
    before = weights.cumsum(-1) - weights
    excluded = before >= limits[1, :, None] * weights.sum(-1, keepdim=True)
    excluded |= values < values[:, :1] + limits[2, :, None].float()  # p < min_p * p_max, in logs
    return scaled.scatter(1, order, values.masked_fill(excluded, -torch.inf))


_POWERS_OF_TWO = (1.5252734e-5, 1.5403530e-4, 1.3333558e-3, 9.6181291e-3, 5.5504109e-2, 2.4022651e-1, 6.9314718e-1, 1.0)
"""Polynomial coefficients of 2^x for |x| <= 1/2, accurate to 1e-7."""


def _weights(below: Tensor) -> Tensor:
    """Return e^x for x <= 0 in float64, with the operations of `weight` in sampling.c.

    Results are multiples of 2^-35, so sums are exact in any order.
    """
    scaled = (below * 1.44269504).clamp_min(-126.0)
    shifted = scaled + 12582912.0
    rest = scaled - (shifted - 12582912.0)
    power = torch.full_like(rest, _POWERS_OF_TWO[0])
    for factor in _POWERS_OF_TWO[1:]:
        power = power * rest + factor
    power = power * ((shifted.view(torch.int32) - 0x4B400000 + 127) << 23).view(torch.float32)
    return ((power + 2.0**-12) - 2.0**-12).double()
