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

import numpy as np

from tot.decoders.kernels.native.compiling import SAMPLING
from tot.decoders.kernels.native.library import Library, address, empty, library
from tot.decoders.machine import threads
from tot.decoders.models.shapes import Array

MIN_TEMPERATURE, _MAX_TEMPERATURE = 1e-6, 1e38
"""Temperatures up to the minimum are greedy: dividing by less would overflow float32. Larger ones are clamped."""
_DRAW = struct.Struct("ffdqqP")
"""The layout of `Sampling` in sampling.c."""


class Draw(NamedTuple):
    """How to draw the token at one position of one sample."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    seed: int
    sample: int
    position: int
    mask: Array | None = None
    """The tokens that may be drawn, one bit a token: (vocab / 32,) in uint32. Applied first; None allows all."""


class Raw(NamedTuple):
    """Read the row of logits itself; with `draw`, also draw a token from it."""

    draw: Draw | None = None


Read = Draw | int | Raw
"""A read of one row of logits: draw a token, return the log-probability of a given token, or return the row."""


class Sampled(NamedTuple):
    """A token and the model's log-probability of it (nats; before mask, temperature and filters)."""

    token: int
    logprob: float
    logits: Array | None = None
    """The row, (vocab,) in float32, if `Raw` requested it. Without a draw, the token is 0."""


def noise_key(draw: Draw) -> int:
    """Return 64 bits that identify (seed, sample, position)."""
    text = struct.pack("<QQQ", draw.seed, draw.sample, draw.position)
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little", signed=True)


@lru_cache(maxsize=4)
def _token_hashes(size: int) -> Array:
    """Return the hash of every token id, the part of the noise that all rows share."""
    return hashed(np.arange(size, dtype=np.uint32))


def hashed(words: Array) -> Array:
    """Return the hash of 32-bit words: Murmur3's finaliser, a bijection."""
    words = words ^ words >> 16
    words *= np.uint32(0x85EBCA6B)
    words ^= words >> 13
    words *= np.uint32(0xC2B2AE35)
    words ^= words >> 16
    return words


def read(logits: Any, reads: Sequence[Read]) -> list[Sampled]:
    """Serve one read per row. `logits` is (rows, vocab) in float32, on the CPU.

    Rows that are not finite give NaN log-probabilities. Ties at temperature 0 go to the token with the lowest id.
    """
    targets = [target.draw or target if isinstance(target, Raw) else target for target in reads]
    functions, logits = _compiled(), np.ascontiguousarray(logits)
    if functions is None:
        tokens, logprobs = _reference().read(logits, targets)
    else:  # in few calls, because every step does this
        tokens = (ctypes.c_int64 * len(targets))(
            *(target if isinstance(target, int) else -1 if isinstance(target, Draw) else 0 for target in targets)
        )
        logprobs = (ctypes.c_float * len(targets))()
        scratch = _scratch(logits, targets)
        functions.read_rows(
            address(logits, np.float32), *logits.shape, address(_token_hashes(logits.shape[1]), np.uint32),
            pack_draws(targets, logits.shape[1]), 1, tokens, logprobs, address(scratch, np.float32), len(scratch),
        )  # fmt: skip
    rows = [logits[i] if isinstance(target, Raw) else None for i, target in enumerate(reads)]
    return list(map(Sampled, tokens, logprobs, rows))


def candidates(logits: Any, draws: Sequence[Draw], count: int) -> list[list[int]]:
    """Return the top `count` tokens of each row by filtered logits / T + G; `read` would draw the first.

    `logits` is as for `read`. A row has fewer tokens if the filters leave fewer. At temperature 0 the tokens are the
    most likely ones.
    """
    functions, logits = _compiled(), np.ascontiguousarray(logits)
    if functions is None:
        tokens = _reference().top_tokens(logits, draws, count)
    else:
        tokens, scratch = empty((len(logits), count), np.int64), _scratch(logits, draws)
        functions.read_rows(
            address(logits, np.float32), *logits.shape, address(_token_hashes(logits.shape[1]), np.uint32),
            pack_draws(draws, logits.shape[1]), count, address(tokens, np.int64), None, address(scratch, np.float32),
            len(scratch),
        )  # fmt: skip
    return [[token for token in row if token >= 0] for row in tokens.tolist()]  # -1 pads shorter rows


def distribution(logits: Any, draw: Draw) -> Array:
    """Return the probability of drawing each token, (vocab,) in float64: masked, after temperature, filtered,
    renormalised."""
    distribution: Array = _reference().distribution(np.asarray(logits), draw)
    return distribution


def _reference() -> Any:
    """Return the module of the functions in numpy."""
    from tot.decoders.engine import sampling_reference

    return sampling_reference


def pack_draws(reads: Sequence[Draw | int | Raw], vocab: int) -> bytes:
    """Pack sampling.c's Draw of each row; zeros for rows without a draw."""
    empty = bytes(_DRAW.size)
    return b"".join(
        _DRAW.pack(
            clamped_temperature(target),
            log_of(target.min_p),
            target.top_p,
            min(target.top_k, vocab),
            noise_key(target),
            0 if target.mask is None else address(target.mask, np.uint32),
        )
        if isinstance(target, Draw)
        else empty
        for target in reads
    )


def _scratch(logits: Array, reads: Sequence[Draw | int | Raw]) -> Array:
    """Return the scratch memory of each thread of sampling.c, which only rows with filters or masks need."""
    needed = any(isinstance(one, Draw) and (one.mask is not None or has_filters(one)) for one in reads)
    return empty((threads(), 5 * logits.shape[1] if needed else 0), np.float32)


def log_of(value: float) -> float:
    return math.log(value) if value else -math.inf


def clamped_temperature(draw: Draw) -> float:
    """Return the clamped temperature; 0 means greedy."""
    return min(draw.temperature, _MAX_TEMPERATURE) if draw.temperature > MIN_TEMPERATURE else 0.0


def has_filters(draw: Draw) -> bool:
    return clamped_temperature(draw) > 0 and bool(draw.top_k or draw.top_p < 1 or draw.min_p)


@lru_cache(maxsize=1)
def _compiled() -> Library | None:
    functions = library(*SAMPLING)
    if functions is not None:
        pointer, number = ctypes.c_void_p, ctypes.c_int64
        functions.read_rows.argtypes = [pointer, number, number, pointer, pointer, number, *[pointer] * 3, number]
        functions.read_rows.restype = None
    return functions
