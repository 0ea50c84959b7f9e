"""Seeded sampling: a token is a pure function of its logits and of (seed, sample, position), never of the batch.

Gumbel-max: the token drawn is argmax(filtered logits / T + G). G is hashed from (seed, sample, position, token id) to
a 24-bit uniform. Integers are hashed for the whole vocabulary; logarithms are taken for the few tokens that can win.
"""

from __future__ import annotations

import ctypes
import hashlib
import math
import struct
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tot.decoders.engine.native import library

_BITS = 24
_ROOM = 256
"""Contenders of one row that there is room for; most draws have a handful."""
_FREEZING = 1e-6
"""Temperatures up to here are greedy: dividing by less would overflow float32."""


class Draw(NamedTuple):
    """How to draw the token at one position of one sample."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    seed: int
    sample: int
    position: int


class Raw(NamedTuple):
    """The row of logits itself is wanted; with `draw`, a token drawn from it too."""

    draw: Draw | None = None


Read = Draw | int | Raw
"""What is wanted of one row of logits: a token drawn, the log-probability of the token given, or the row."""


class Sampled(NamedTuple):
    """A token and the model's log-probability of it (nats; before temperature and filters)."""

    token: int
    logprob: float
    logits: Tensor | None = None
    """The row, (vocab,) in float32, where that was asked for; the token is 0 where none was drawn."""


def noise_key(draw: Draw) -> int:
    """64 bits that stand for (seed, sample, position)."""
    text = struct.pack("<QQQ", draw.seed, draw.sample, draw.position)
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little", signed=True)


def _mix(words: Tensor) -> Tensor:
    """Murmur3's finaliser, a bijection of 32-bit words (int32: products wrap, masks make shifts logical)."""
    words = words ^ ((words >> 16) & 0xFFFF)
    words *= -0x7A143595  # 0x85EBCA6B
    words ^= (words >> 13) & 0x7FFFF
    words *= -0x3D4D51CB  # 0xC2B2AE35
    words ^= (words >> 16) & 0xFFFF
    return words


@lru_cache(maxsize=4)
def _vocabulary(size: int, device: torch.device) -> Tensor:
    """The hash of every token id, the part of the noise that all rows share."""
    return _mix(torch.arange(size, dtype=torch.int32, device=device))


def _gaps(keys: Tensor, hashes: Tensor) -> Tensor:
    """24 uniform bits for (key, hashed token id), int32; shapes broadcast."""
    low, high = keys.to(torch.int32), (keys >> 32).to(torch.int32)
    words = _mix(hashes ^ low)
    words ^= high
    words *= -0x61C88647  # 0x9E3779B9
    gaps: Tensor = (words ^ ((words >> 15) & 0x1FFFF)) & (2**_BITS - 1)
    return gaps


def _noise(gaps: Tensor) -> Tensor:
    """Gumbel noise in float64: -log(-log(u)), u = 1 - (gap + 1/2) / 2^24."""
    return -torch.log(-torch.log1p(-(gaps.double() + 0.5) / 2**_BITS))


def gumbel(keys: Tensor, tokens: Tensor) -> Tensor:
    """Gumbel noise in float64 for (key, token id) pairs; `keys` are int64 from `noise_key`, shapes broadcast."""
    return _noise(_gaps(keys, _mix(tokens.to(torch.int32))))


def read(logits: Tensor, reads: Sequence[Read]) -> list[Sampled]:
    """Serve one read a row. `logits` is (rows, vocab) in float32; a row that is not finite gives NaN log-probabilities.

    Ties at temperature 0 go to the token with the lowest id.
    """
    normaliser = torch.logsumexp(logits, dim=-1)
    tokens = torch.zeros(len(reads), dtype=torch.int64)
    raw = {i for i, wanted in enumerate(reads) if isinstance(wanted, Raw)}
    reads = [wanted.draw or wanted if isinstance(wanted, Raw) else wanted for wanted in reads]
    drawn = [i for i, wanted in enumerate(reads) if isinstance(wanted, Draw) and wanted.temperature > _FREEZING]
    greedy = [i for i, wanted in enumerate(reads) if isinstance(wanted, Draw) and wanted.temperature <= _FREEZING]
    given = [i for i, wanted in enumerate(reads) if isinstance(wanted, int)]
    if given:
        tokens[given] = torch.tensor([reads[i] for i in given])
    if greedy:
        tokens[greedy] = (logits if len(greedy) == len(reads) else logits[greedy]).argmax(dim=-1).cpu()
    if drawn:
        draws = [wanted for wanted in reads if isinstance(wanted, Draw) and wanted.temperature > _FREEZING]
        tokens[drawn] = _gumbel_max(logits if len(drawn) == len(reads) else logits[drawn], draws).cpu()
    logprobs = logits.gather(1, tokens.to(logits.device)[:, None])[:, 0] - normaliser
    logprobs = torch.where(torch.isfinite(normaliser), logprobs, torch.nan)
    return [
        Sampled(token, logprob, logits[i] if i in raw else None)
        for i, (token, logprob) in enumerate(zip(tokens.tolist(), logprobs.tolist(), strict=True))
    ]


def distribution(logits: Tensor, draw: Draw) -> Tensor:
    """The probabilities that a token is drawn with, (vocab,) in float64: after temperature, filtered, renormalised."""
    if draw.temperature <= _FREEZING:
        point = torch.zeros_like(logits, dtype=torch.float64)
        point[logits.argmax()] = 1.0
        return point
    return _scaled(logits[None], [draw])[0].double().softmax(-1)


def _gumbel_max(logits: Tensor, draws: Sequence[Draw]) -> Tensor:
    """(rows, vocab) -> (rows,) tokens drawn."""
    scaled = _scaled(logits, draws)
    keys = torch.tensor([noise_key(draw) for draw in draws], device=logits.device)
    top, top_token = scaled.max(dim=-1)
    reached = top.double() + gumbel(keys, top_token)  # some token gets at least this
    rows, contenders, scores = _contenders(scaled, keys, reached)
    best = torch.full_like(reached, -torch.inf).scatter_reduce(0, rows, scores, "amax")
    wins = scores == best[rows]
    none = logits.shape[1]
    winner = torch.full_like(top_token, none).scatter_reduce(0, rows[wins], contenders[wins], "amin")
    return torch.where(winner < none, winner, top_token)  # in a row of NaN nothing wins; its log-probability says so


def _scaled(logits: Tensor, draws: Sequence[Draw]) -> Tensor:
    """(rows, vocab) logits over temperatures, filtered."""
    temperature = torch.tensor([draw.temperature for draw in draws], device=logits.device)
    return filtered(logits / temperature[:, None].to(logits.dtype), draws)


def _contenders(scaled: Tensor, keys: Tensor, reached: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(rows, tokens, scores) of the few tokens whose scaled + G may be `reached` (rows,) or more."""
    found = _looked_up(scaled, keys, reached)
    if found is not None:
        rows, tokens = found
        return rows, tokens, scaled[rows, tokens].double() + gumbel(keys[rows], tokens)
    # scaled + G >= reached  <=>  1 - u <= 1 - exp(-w), which is at most w = exp(scaled - reached).
    gaps = _gaps(keys[:, None], _vocabulary(scaled.shape[1], scaled.device))
    reach = (
        torch.exp(scaled - reached[:, None].float()).mul_(2.0**_BITS * 1.0001).add_(1)
    )  # float32 rounds; err upwards
    rows, tokens = torch.nonzero(gaps <= reach, as_tuple=True)
    return rows, tokens, scaled[rows, tokens].double() + _noise(gaps[rows, tokens])


def _looked_up(scaled: Tensor, keys: Tensor, reached: Tensor) -> tuple[Tensor, Tensor] | None:
    """(rows, tokens) of contenders, by the function in C; None where there is none, or they are too many to be few."""
    search = _search() if scaled.device.type == "cpu" and scaled.dtype == torch.float32 else None
    if search is None:
        return None
    scaled = scaled.contiguous()
    least = reached.float()
    least -= 1e-6 * least.abs() + 1e-3  # float32 rounds; err downwards
    hashes = _vocabulary(scaled.shape[1], scaled.device)
    found, counts = torch.empty((len(scaled), _ROOM), dtype=torch.int64), torch.empty(len(scaled), dtype=torch.int64)
    search(
        scaled.data_ptr(), *scaled.shape, hashes.data_ptr(), keys.data_ptr(), least.data_ptr(), found.data_ptr(),
        counts.data_ptr(), _ROOM, torch.get_num_threads(),
    )  # fmt: skip
    if int(counts.min()) < 0:
        return None
    there = torch.arange(_ROOM) < counts[:, None]
    return torch.repeat_interleave(torch.arange(len(scaled)), counts), found[there]


@lru_cache(maxsize=1)
def _search() -> Any:
    """The function of contenders.c, or None."""
    functions = library("contenders", "-O3", "-fopenmp")
    if functions is not None:
        pointer, number = ctypes.c_void_p, ctypes.c_int64
        functions.contenders.argtypes = [pointer, number, number, *[pointer] * 5, number, number]
        functions.contenders.restype = None
    return None if functions is None else functions.contenders


def candidates(logits: Tensor, draws: Sequence[Draw], count: int) -> list[list[int]]:
    """The `count` tokens of each row that come first by filtered logits / T + G, the first of which `read` would draw.

    `logits` is (rows, vocab) in float32. A row has fewer where the filters leave fewer; at temperature 0 they are the
    likeliest ones.
    """
    if count == 1:
        return [[sampled.token] for sampled in read(logits, draws)]
    first: list[list[int]] = [[] for _ in draws]
    greedy = [i for i, draw in enumerate(draws) if draw.temperature <= _FREEZING]
    for i, order in zip(greedy, logits[greedy].sort(dim=-1, descending=True, stable=True).indices, strict=True):
        first[i] = order[:count].tolist()
    drawn = [i for i, draw in enumerate(draws) if draw.temperature > _FREEZING]
    if not drawn:
        return first
    scaled = _scaled(logits[drawn], [draws[i] for i in drawn])
    keys = torch.tensor([noise_key(draws[i]) for i in drawn], device=logits.device)
    likely = scaled.topk(min(8 * count, scaled.shape[1]), dim=-1)
    sure = likely.values.double() + gumbel(keys[:, None], likely.indices)
    reached = sure.topk(min(count, sure.shape[1]), dim=-1).values[:, -1]  # so many tokens get at least this
    rows, tokens, scores = _contenders(scaled, keys, reached)
    found = sorted(zip(rows.tolist(), (-scores).tolist(), tokens.tolist(), strict=True))
    for row, worth, token in found:
        if worth < math.inf and len(first[drawn[row]]) < count:
            first[drawn[row]].append(token)
    return first


def filtered(scaled: Tensor, draws: Sequence[Draw]) -> Tensor:
    """`scaled` (rows, vocab) with the tokens that top-k, top-p and min-p leave out at -inf."""
    rows = [i for i, draw in enumerate(draws) if draw.top_k or draw.top_p < 1 or draw.min_p]
    if not rows:
        return scaled
    scaled = scaled.clone()
    for i in rows:
        draw = draws[i]
        row = scaled[i]
        if 0 < draw.top_k < len(row):
            row[row < row.topk(draw.top_k).values[-1]] = -torch.inf
        if draw.top_p < 1:
            values, order = row.sort(descending=True, stable=True)
            before = values.softmax(-1).cumsum(-1) - values.softmax(-1)
            row[order[before >= draw.top_p]] = -torch.inf  # the first token has nothing before it, so it stays
        if draw.min_p:
            row[row < row.max() + math.log(draw.min_p)] = -torch.inf  # p < min_p * p_max, in logs
    return scaled
