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

_BITS = 24
_FREEZING, _MELTING = 1e-6, 1e38
"""Temperatures up to the first are greedy: dividing by less would overflow float32. Those above the second are it."""
_DRAW = struct.Struct("ffdqq")
"""A Draw as sampling.c has it."""


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
    states: Tensor | None = None
    """(layers, hidden) in float16 on the CPU: what it was drawn from, where that was asked for."""


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
    wanted = [one.draw or one if isinstance(one, Raw) else one for one in reads]
    functions = _functions(logits)
    tokens, logprobs = _read_by_torch(logits, wanted) if functions is None else _read(functions, logits, wanted)
    rows = [logits[i] if isinstance(one, Raw) else None for i, one in enumerate(reads)]
    return list(map(Sampled, tokens, logprobs, rows))


def candidates(logits: Tensor, draws: Sequence[Draw], count: int) -> list[list[int]]:
    """The `count` tokens of each row that come first by filtered logits / T + G, the first of which `read` would draw.

    `logits` is (rows, vocab) in float32. A row has fewer where the filters leave fewer; at temperature 0 they are the
    likeliest ones.
    """
    return [[token for token in row if token >= 0] for row in _first(logits, draws, count).tolist()]


def distribution(logits: Tensor, draw: Draw) -> Tensor:
    """The probabilities that a token is drawn with, (vocab,) in float64: after temperature, filtered, renormalised."""
    if draw.temperature <= _FREEZING:
        point = torch.zeros_like(logits, dtype=torch.float64)
        point[logits.argmax()] = 1.0
        return point
    scaled, temperatures = _prepared(logits[None], [draw])
    return (scaled / temperatures[:, None])[0].double().softmax(-1)


def _read(functions: ctypes.CDLL, logits: Tensor, wanted: Sequence[Draw | int | Raw]) -> tuple[list[int], list[float]]:
    """Tokens and their log-probabilities by sampling.c: as few calls as can be, as this is done in every step."""
    logits = logits.contiguous()
    tokens = (ctypes.c_int64 * len(wanted))(
        *(one if isinstance(one, int) else -1 if isinstance(one, Draw) else 0 for one in wanted)
    )
    logprobs = (ctypes.c_float * len(wanted))()
    hashes, scratch = _vocabulary(logits.shape[1], logits.device), _scratch(logits, wanted)
    functions.read_rows(
        address(logits, torch.float32), *logits.shape, address(hashes, torch.int32), _packed(wanted, logits.shape[1]),
        tokens, logprobs, address(scratch, torch.float32), torch.get_num_threads(),
    )  # fmt: skip
    return list(tokens), list(logprobs)


def _read_by_torch(logits: Tensor, wanted: Sequence[Draw | int | Raw]) -> tuple[list[int], list[float]]:
    """What `read_rows` of sampling.c does."""
    tokens = torch.tensor([one if isinstance(one, int) else 0 for one in wanted], device=logits.device)
    drawn = [i for i, one in enumerate(wanted) if isinstance(one, Draw)]
    if drawn:
        draws = [one for one in wanted if isinstance(one, Draw)]
        first = _first(logits if len(drawn) == len(wanted) else logits[drawn], draws, 1)
        tokens[drawn] = first[:, 0].clamp_min(0)  # in a row of NaN nothing wins; its log-probability says so
    normaliser = torch.logsumexp(logits, dim=-1)
    logprobs = logits.gather(1, tokens[:, None])[:, 0] - normaliser
    return tokens.tolist(), torch.where(torch.isfinite(normaliser), logprobs, torch.nan).tolist()


def _first(logits: Tensor, draws: Sequence[Draw], count: int) -> Tensor:
    """(rows, vocab) -> (rows, count) tokens, the first ones by filtered logits / T + G; -1 where there are no more."""
    functions = _functions(logits)
    if functions is None:
        logits, temperatures = _prepared(logits, draws)
        keys = torch.tensor([noise_key(draw) for draw in draws], device=logits.device)
        return _first_by_torch(logits, temperatures, keys, count)
    logits = logits.contiguous()
    tokens = torch.empty((len(logits), count), dtype=torch.int64)
    hashes, scratch = _vocabulary(logits.shape[1], logits.device), _scratch(logits, draws)
    functions.draw(
        address(logits, torch.float32), *logits.shape, address(hashes, torch.int32), _packed(draws, logits.shape[1]),
        count, address(tokens, torch.int64), address(scratch, torch.float32), torch.get_num_threads(),
    )  # fmt: skip
    return tokens


def _packed(wanted: Sequence[Draw | int | Raw], vocabulary: int) -> bytes:
    """sampling.c's Draw of each row; zeros where nothing is drawn."""
    nothing = bytes(_DRAW.size)
    return b"".join(
        _DRAW.pack(_hot(one), _log(one.min_p), one.top_p, min(one.top_k, vocabulary), noise_key(one))
        if isinstance(one, Draw)
        else nothing
        for one in wanted
    )


def _scratch(logits: Tensor, wanted: Sequence[Draw | int | Raw]) -> Tensor:
    """What sampling.c needs for rows with filters, for each thread."""
    filters = any(isinstance(one, Draw) and _filters(one) for one in wanted)
    return torch.empty(torch.get_num_threads() * 4 * logits.shape[1] if filters else 0)


def _log(share: float) -> float:
    return math.log(share) if share else -math.inf


def _hot(draw: Draw) -> float:
    """The temperature, 0 where the likeliest token is wanted."""
    return min(draw.temperature, _MELTING) if draw.temperature > _FREEZING else 0.0


def _filters(draw: Draw) -> bool:
    return _hot(draw) > 0 and bool(draw.top_k or draw.top_p < 1 or draw.min_p)


def _prepared(logits: Tensor, draws: Sequence[Draw]) -> tuple[Tensor, Tensor]:
    """Logits and temperatures (rows,), 0 where the likeliest is wanted; rows with filters are divided already."""
    temperatures = torch.tensor([_hot(draw) for draw in draws], device=logits.device)
    rows = [i for i, draw in enumerate(draws) if _filters(draw)]
    if rows:
        scaled = filtered(logits[rows] / temperatures[rows, None], [draws[i] for i in rows])
        logits = logits.index_copy(0, torch.tensor(rows, device=logits.device), scaled)
        temperatures[rows] = 1.0
    return logits.contiguous(), temperatures


def _first_by_torch(logits: Tensor, temperatures: Tensor, keys: Tensor, count: int) -> Tensor:
    """What `draw` of sampling.c does."""
    first = torch.full((len(logits), count), -1, device=logits.device)
    most = min(count, logits.shape[1])
    greedy, drawn = (temperatures == 0).nonzero()[:, 0], temperatures.nonzero()[:, 0]
    if len(greedy):
        cold = logits[greedy]
        likeliest = (
            cold.argmax(-1, keepdim=True)
            if count == 1
            else cold.argsort(stable=True, dim=-1, descending=True)[:, :most]
        )
        first[greedy, :most] = torch.where(cold.gather(1, likeliest) > -torch.inf, likeliest, -1)
    if not len(drawn):
        return first
    keys, scaled = keys[drawn], logits[drawn] / temperatures[drawn, None]
    likely = scaled.topk(min(8 * count, scaled.shape[1]), dim=-1)
    sure = likely.values.double() + gumbel(keys[:, None], likely.indices)
    reached = sure.topk(most, dim=-1).values[:, -1]  # so many tokens get at least this
    # scaled + G >= reached  <=>  1 - u <= 1 - exp(-w), which is at most w = exp(scaled - reached).
    gaps = _gaps(keys[:, None], _vocabulary(scaled.shape[1], scaled.device))
    least = reached.float()
    least -= 1e-6 * least.abs() + 1e-3  # float32 rounds; err downwards
    reach = torch.exp(scaled - least[:, None]).mul_(2.0**_BITS).add_(1)
    rows, tokens = ((gaps <= reach) & (scaled > -torch.inf)).nonzero(as_tuple=True)
    order = (scaled[rows, tokens].double() + _noise(gaps[rows, tokens])).argsort(descending=True, stable=True)
    order = order[rows[order].argsort(stable=True)]  # row by row, the best first and equal ones by token
    rows, tokens = rows[order], tokens[order]
    place = torch.arange(len(rows), device=rows.device) - torch.searchsorted(rows, rows)
    few = place < count
    first[drawn[rows[few]], place[few]] = tokens[few]
    return first


def _functions(logits: Tensor) -> ctypes.CDLL | None:
    """The functions of sampling.c for such logits, or None."""
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
    """`scaled` (rows, vocab) with the tokens that top-k, top-p and min-p leave out at -inf.

    Top-k keeps all that are as large as the k-th. Top-p, of what that leaves, keeps a token while those before it weigh
    less than top_p of all: the larger come first, of equal ones the lower ids. `kept_of` in sampling.c keeps the same.
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
"""2^x for |x| <= 1/2 as a polynomial, to 1e-7."""


def _weights(below: Tensor) -> Tensor:
    """e^x for x <= 0 by the operations of `weight` in sampling.c, as float64: whole steps of 2^-35, so that a sum is
    exact, and the same in any order."""
    scaled = (below * 1.44269504).clamp_min(-126.0)
    shifted = scaled + 12582912.0
    rest = scaled - (shifted - 12582912.0)
    power = torch.full_like(rest, _POWERS_OF_TWO[0])
    for factor in _POWERS_OF_TWO[1:]:
        power = power * rest + factor
    power = power * ((shifted.view(torch.int32) - 0x4B400000 + 127) << 23).view(torch.float32)
    return ((power + 2.0**-12) - 2.0**-12).double()
