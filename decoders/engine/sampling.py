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
from typing import NamedTuple

import torch
from torch import Tensor

from tot.decoders.kernels.native.compiling import SAMPLING
from tot.decoders.kernels.native.library import address, library
from tot.decoders.machine import threads

_BITS = 24
_MIN_TEMPERATURE, _MAX_TEMPERATURE = 1e-6, 1e38
"""Temperatures up to the minimum are greedy: dividing by less would overflow float32. Larger ones are clamped."""
_DRAW = struct.Struct("ffdqq")
"""The layout of `Draw` in sampling.c."""


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
    """Read the row of logits itself; with `draw`, also draw a token from it."""

    draw: Draw | None = None


Read = Draw | int | Raw
"""A read of one row of logits: draw a token, return the log-probability of a given token, or return the row."""


class Sampled(NamedTuple):
    """A token and the model's log-probability of it (nats; before temperature and filters)."""

    token: int
    logprob: float
    logits: Tensor | None = None
    """The row, (vocab,) in float32, if `Raw` requested it. Without a draw, the token is 0."""
    states: Tensor | None = None
    """(layers, hidden) in float16 on the CPU: the states that the token was drawn from, if requested."""


def noise_key(draw: Draw) -> int:
    """Return 64 bits that identify (seed, sample, position)."""
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
def _token_hashes(size: int, device: torch.device) -> Tensor:
    """Return the hash of every token id: the part of the noise that all rows share."""
    return _mix(torch.arange(size, dtype=torch.int32, device=device))


def _gaps(keys: Tensor, hashes: Tensor) -> Tensor:
    """Return 24 uniform bits for (key, hashed token id), int32; shapes broadcast."""
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
    """Serve one read per row. `logits` is (rows, vocab) in float32.

    Rows that are not finite give NaN log-probabilities. Ties at temperature 0 go to the token with the lowest id.
    """
    targets = [target.draw or target if isinstance(target, Raw) else target for target in reads]
    functions = _functions(logits)
    tokens, logprobs = _read_by_torch(logits, targets) if functions is None else _read(functions, logits, targets)
    rows = [logits[i] if isinstance(target, Raw) else None for i, target in enumerate(reads)]
    return list(map(Sampled, tokens, logprobs, rows))


def candidates(logits: Tensor, draws: Sequence[Draw], count: int) -> list[list[int]]:
    """Return the top `count` tokens of each row by filtered logits / T + G; `read` would draw the first.

    `logits` is (rows, vocab) in float32. A row has fewer tokens if the filters leave fewer. At temperature 0 the tokens
    are the most likely ones.
    """
    return [[token for token in row if token >= 0] for row in _top_tokens(logits, draws, count).tolist()]


def distribution(logits: Tensor, draw: Draw) -> Tensor:
    """Return the probability of drawing each token, (vocab,) in float64: after temperature, filtered, renormalised."""
    if draw.temperature <= _MIN_TEMPERATURE:
        point = torch.zeros_like(logits, dtype=torch.float64)
        point[logits.argmax()] = 1.0
        return point
    scaled, temperatures = _prepare(logits[None], [draw])
    return (scaled / temperatures[:, None])[0].double().softmax(-1)


def _read(functions: ctypes.CDLL, logits: Tensor, targets: Sequence[Draw | int | Raw]) -> tuple[list[int], list[float]]:
    """Read tokens and log-probabilities with sampling.c, in few calls because every step does this."""
    logits = logits.contiguous()
    tokens = (ctypes.c_int64 * len(targets))(
        *(target if isinstance(target, int) else -1 if isinstance(target, Draw) else 0 for target in targets)
    )
    logprobs = (ctypes.c_float * len(targets))()
    hashes, workers = _token_hashes(logits.shape[1], logits.device), threads()
    scratch = _scratch(logits, targets, workers)
    functions.read_rows(
        address(logits, torch.float32), *logits.shape, address(hashes, torch.int32),
        _pack_draws(targets, logits.shape[1]), tokens, logprobs,
        address(scratch, torch.float32), workers,
    )  # fmt: skip
    return list(tokens), list(logprobs)


def _read_by_torch(logits: Tensor, targets: Sequence[Draw | int | Raw]) -> tuple[list[int], list[float]]:
    """PyTorch version of `read_rows` in sampling.c."""
    tokens = torch.tensor([target if isinstance(target, int) else 0 for target in targets], device=logits.device)
    draw_rows = [i for i, target in enumerate(targets) if isinstance(target, Draw)]
    if draw_rows:
        draws = [target for target in targets if isinstance(target, Draw)]
        top = _top_tokens(logits if len(draw_rows) == len(targets) else logits[draw_rows], draws, 1)
        tokens[draw_rows] = top[:, 0].clamp_min(0)  # a row of NaN has no best token
    normaliser = torch.logsumexp(logits, dim=-1)
    logprobs = logits.gather(1, tokens[:, None])[:, 0] - normaliser
    return tokens.tolist(), torch.where(torch.isfinite(normaliser), logprobs, torch.nan).tolist()


def _top_tokens(logits: Tensor, draws: Sequence[Draw], count: int) -> Tensor:
    """Return the top tokens by filtered logits / T + G, (rows, vocab) -> (rows, count); -1 pads shorter rows."""
    functions = _functions(logits)
    if functions is None:
        logits, temperatures = _prepare(logits, draws)
        keys = torch.tensor([noise_key(draw) for draw in draws], device=logits.device)
        return _top_tokens_by_torch(logits, temperatures, keys, count)
    logits = logits.contiguous()
    tokens = torch.empty((len(logits), count), dtype=torch.int64)
    hashes, workers = _token_hashes(logits.shape[1], logits.device), threads()
    scratch = _scratch(logits, draws, workers)
    functions.draw(
        address(logits, torch.float32), *logits.shape, address(hashes, torch.int32),
        _pack_draws(draws, logits.shape[1]), count, address(tokens, torch.int64),
        address(scratch, torch.float32), workers,
    )  # fmt: skip
    return tokens


def _pack_draws(reads: Sequence[Draw | int | Raw], vocab: int) -> bytes:
    """Pack sampling.c's Draw of each row; zeros for rows without a draw."""
    empty = bytes(_DRAW.size)
    return b"".join(
        _DRAW.pack(
            _clamped_temperature(target), _log(target.min_p), target.top_p, min(target.top_k, vocab), noise_key(target)
        )
        if isinstance(target, Draw)
        else empty
        for target in reads
    )


def _scratch(logits: Tensor, reads: Sequence[Draw | int | Raw], workers: int) -> Tensor:
    """Return the scratch memory that sampling.c needs for rows with filters, for `workers` threads."""
    filters = any(isinstance(target, Draw) and _has_filters(target) for target in reads)
    return torch.empty(workers * 4 * logits.shape[1] if filters else 0)


def _log(value: float) -> float:
    return math.log(value) if value else -math.inf


def _clamped_temperature(draw: Draw) -> float:
    """Return the clamped temperature; 0 means greedy."""
    return min(draw.temperature, _MAX_TEMPERATURE) if draw.temperature > _MIN_TEMPERATURE else 0.0


def _has_filters(draw: Draw) -> bool:
    return _clamped_temperature(draw) > 0 and bool(draw.top_k or draw.top_p < 1 or draw.min_p)


def _prepare(logits: Tensor, draws: Sequence[Draw]) -> tuple[Tensor, Tensor]:
    """Return logits and temperatures (rows,). Greedy rows have 0; rows with filters are already divided and have 1."""
    temperatures = torch.tensor([_clamped_temperature(draw) for draw in draws], device=logits.device)
    rows = [i for i, draw in enumerate(draws) if _has_filters(draw)]
    if rows:
        scaled = filtered(logits[rows] / temperatures[rows, None], [draws[i] for i in rows])
        logits = logits.index_copy(0, torch.tensor(rows, device=logits.device), scaled)
        temperatures[rows] = 1.0
    return logits.contiguous(), temperatures


def _top_tokens_by_torch(logits: Tensor, temperatures: Tensor, keys: Tensor, count: int) -> Tensor:
    """PyTorch version of `draw` in sampling.c."""
    top = torch.full((len(logits), count), -1, device=logits.device)
    width = min(count, logits.shape[1])
    greedy, sampled = (temperatures == 0).nonzero()[:, 0], temperatures.nonzero()[:, 0]
    if len(greedy):
        greedy_logits = logits[greedy]
        best = (
            greedy_logits.argmax(-1, keepdim=True)
            if count == 1
            else greedy_logits.argsort(stable=True, dim=-1, descending=True)[:, :width]
        )
        top[greedy, :width] = torch.where(greedy_logits.gather(1, best) > -torch.inf, best, -1)
    if not len(sampled):
        return top
    keys, scaled = keys[sampled], logits[sampled] / temperatures[sampled, None]
    largest = scaled.topk(min(8 * count, scaled.shape[1]), dim=-1)
    scores = largest.values.double() + gumbel(keys[:, None], largest.indices)
    threshold = scores.topk(width, dim=-1).values[:, -1]  # `width` tokens score at least this
    # scaled + G >= threshold  <=>  1 - u <= 1 - exp(-w), which is at most w = exp(scaled - threshold).
    gaps = _gaps(keys[:, None], _token_hashes(scaled.shape[1], scaled.device))
    bound = threshold.float()
    bound -= 1e-6 * bound.abs() + 1e-3  # float32 rounds: lower the bound
    max_gaps = torch.exp(scaled - bound[:, None]).mul_(2.0**_BITS).add_(1)
    rows, tokens = ((gaps <= max_gaps) & (scaled > -torch.inf)).nonzero(as_tuple=True)
    order = (scaled[rows, tokens].double() + _noise(gaps[rows, tokens])).argsort(descending=True, stable=True)
    order = order[rows[order].argsort(stable=True)]  # by row, then best first, ties by token id
    rows, tokens = rows[order], tokens[order]
    rank = torch.arange(len(rows), device=rows.device) - torch.searchsorted(rows, rows)
    within = rank < count
    top[sampled[rows[within]], rank[within]] = tokens[within]
    return top


def _functions(logits: Tensor) -> ctypes.CDLL | None:
    """Return the functions of sampling.c if they support these logits, else None."""
    return _compiled() if logits.device.type == "cpu" and logits.dtype == torch.float32 else None


@lru_cache(maxsize=1)
def _compiled() -> ctypes.CDLL | None:
    functions = library(*SAMPLING)
    if functions is not None:
        pointer, number = ctypes.c_void_p, ctypes.c_int64
        functions.draw.argtypes = [pointer, number, number, pointer, pointer, number, pointer, pointer, number]
        functions.read_rows.argtypes = [pointer, number, number, *[pointer] * 5, number]
        functions.draw.restype = functions.read_rows.restype = None
        functions.size_of_draw.restype = number
        assert functions.size_of_draw() == _DRAW.size
    return functions


def filtered(scaled: Tensor, draws: Sequence[Draw]) -> Tensor:
    """Return `scaled` (rows, vocab) with -inf for the tokens that top-k, top-p and min-p exclude.

    Top-k keeps ties with the k-th token. Top-p then keeps a token while the larger ones (ties: lower ids) have less
    than top_p of the remaining probability. `kept_of` in sampling.c applies the same rules.
    """
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
            weights = _weights(values - values[0])
            before = weights.cumsum(-1) - weights
            row[order[before >= draw.top_p * weights.sum()]] = -torch.inf
        if draw.min_p:
            row[row < row.max() + math.log(draw.min_p)] = -torch.inf  # p < min_p * p_max, in logs
    return scaled


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
