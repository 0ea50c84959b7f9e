"""Packed attention in C (attention.c), with AVX-512, AVX2 or NEON: what rows see is cut into tiles, consecutive rows.

Stretches of text that several rows share are one piece for all of a tile's rows; the rest of each row's path is a piece
of its own. The kernel takes softmax as it goes through the pieces, so nothing is padded and nothing merged.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Sequence
from ctypes import POINTER, Structure, byref, c_float, c_int32, c_int64, c_void_p, sizeof
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from tot.decoders.kernels.native.compiling import LEVELS, attention
from tot.decoders.kernels.native.library import address, level, library, log_once, processor_flags, sizes_agree
from tot.decoders.kernels.native.shared_prefixes import Run, shared_prefixes, windows

_MOST_GROUPS = 16
_MOST_DIMENSIONS = 256
_ROWS = 16
"""Of a tile, at most: TILE in attention.c."""
_FEW = 24
"""Up to so many rows tiles are half as high, so that there are some for more threads."""
_NONE = -(2**30)
"""Slots that are hidden, where none are."""
_WORTH_SHARING = 32
"""Keys times rows saved from which a stretch is a piece for several rows."""

_Numbers = np.ndarray[tuple[int, ...], np.dtype[np.int32]]


class Tiles(NamedTuple):
    """What the kernel goes through. Keep it while it runs: it is given addresses."""

    slots: _Numbers
    """The slots of all pieces, one after another."""
    pieces: _Numbers
    """(pieces, 6): first and last row in the tile, where its slots begin, how many of them its first row sees, how many
    more each further row does, and how many of the first ones it does not see. Those of a tile stand together."""
    starts: _Numbers
    """(tiles + 1,) the first piece of each."""
    rows: int
    """Of each tile but the last."""


def make_tiles(runs: Sequence[Run], window: int | None = None) -> tuple[list[int], Tiles]:
    """Cut the attention of `runs`. Returns the packing order of the runs, and the tiles in row numbers. With a `window`
    rows see so many tokens, and are packed in the order of the runs."""
    shares, tails = shared_prefixes(runs, _WORTH_SHARING) if window is None else windows(runs, window)
    first_row = [0]
    for tail in tails:
        first_row.append(first_row[-1] + runs[tail.run].rows)
    rows = first_row[-1]
    most = _ROWS if rows > _FEW else _ROWS // 2
    height = -(-rows // -(-rows // most))  # all as high as each other, or nearly
    pieces: list[tuple[int, int, int, int, int, int, int]] = []
    slots: list[np.ndarray[tuple[int], np.dtype[np.int32]]] = []
    offset = 0

    def piece(first: int, last: int, seen: int, step: int, hidden: int = _NONE) -> None:
        """Rows `first` up to `last`: the first sees `seen` slots but for `hidden`, each further one `step` more."""
        for tile in range(first // height, -(-last // height)):
            start, end = max(first, tile * height), min(last, (tile + 1) * height)
            further = step * (start - first)
            rows = start - tile * height, end - tile * height
            pieces.append((tile, *rows, offset, seen + further, step, hidden + further))

    for share in shares:
        piece(first_row[share.first], first_row[share.last], len(share.slots), 0)
        slots.append(share.slots)
        offset += len(share.slots)
    for tail, first, last in zip(tails, first_row, first_row[1:], strict=False):
        run = runs[tail.run]
        seen = run.start - tail.depth + 1
        piece(first, last, seen, 1, _NONE if window is None else seen - window)
        slots.append(run.path[tail.depth :])
        offset += len(run.path) - tail.depth
    table = np.array(sorted(pieces), dtype=np.int32)
    starts = np.searchsorted(table[:, 0], np.arange(-(-rows // height) + 1)).astype(np.int32)
    order = [tail.run for tail in tails]
    return order, Tiles(np.concatenate(slots), np.ascontiguousarray(table[:, 1:]), starts, height)


class CTiles(Structure):
    """Tiles, as attention.c knows them. The arrays they were made from must outlive it."""

    _fields_ = [
        ("slots", c_void_p),
        ("pieces", c_void_p),
        ("starts", c_void_p),
        ("count", c_int64),
        ("rows", c_int64),
    ]

    @classmethod
    def of(cls, tiles: Tiles) -> CTiles:
        places = (tiles.slots.ctypes.data, tiles.pieces.ctypes.data, tiles.starts.ctypes.data)
        return cls(*places, len(tiles.starts) - 1, tiles.rows)


class _Attention(Structure):
    _fields_ = [
        *((name, c_void_p) for name in ("query", "keys", "values", "out")),
        *((name, c_int64) for name in ("head_stride", "row_stride", "kv_head_stride", "slot_stride")),
        *((name, c_int64) for name in ("rows", "kv_heads", "groups")),
        ("scale", c_float),
        ("cap", c_float),
    ]


SIZES = (6 * sizeof(c_int32), sizeof(CTiles), sizeof(_Attention))
"""In bytes, of a piece, of tiles and of what is told of a layer."""


class Kernel:
    """Attention over tiles, for one head dimension and number format."""

    def __init__(self, functions: ctypes.CDLL, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._attend = functions.attend
        self._attend.argtypes = [POINTER(_Attention), POINTER(CTiles), c_int64]
        self._attend.restype = None

    def __call__(
        self, query: Tensor, keys: Tensor, values: Tensor, tiles: Tiles, scale: float, cap: float = 0.0
    ) -> Tensor:
        """Shapes: query (heads, rows, head_dim); keys, values (kv_heads, slots, head_dim); all on the CPU. Scores are
        capped softly at `cap`, unless that is 0. Returns (rows, heads, head_dim).
        """
        heads, rows, head_dim = query.shape
        if query.stride(2) != 1:
            query = query.contiguous()
        if keys.stride() != values.stride():
            raise TypeError(f"keys have strides {keys.stride()}, and values {values.stride()}: C knows of one")
        out = torch.empty((rows, heads, head_dim), dtype=query.dtype)
        kv_heads = keys.shape[0]
        attention = _Attention(
            *(address(tensor, self._dtype, strided=True) for tensor in (query, keys, values, out)),
            *(query.stride(0), query.stride(1), keys.stride(0), keys.stride(1)),
            *(rows, kv_heads, heads // kv_heads, scale, cap),
        )
        self._attend(byref(attention), byref(CTiles.of(tiles)), torch.get_num_threads())
        return out


def kernel_for(head_dim: int, groups: int, dtype: torch.dtype, device: torch.device) -> Kernel | None:
    """The kernel for a model whose `groups` query heads share a key-value head; None where torch has to do it."""
    if not kernels_run(head_dim, groups, dtype, device):
        return None
    functions = library(*attention(head_dim, dtype == torch.float32))
    if functions is None or not sizes_agree(functions, "attention_sizes", SIZES):
        return None
    return Kernel(functions, dtype)


def kernels_run(head_dim: int, groups: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether attention.c can be compiled for such a model, and run here."""
    if device.type != "cpu" or groups > _MOST_GROUPS or head_dim > _MOST_DIMENSIONS:
        return False
    step = 16 if dtype == torch.float32 else 32
    if dtype not in (torch.float32, torch.bfloat16) or head_dim % step:
        return False
    suited = [one for one in LEVELS if dtype == torch.float32 or one.bfloat16]
    if level() not in suited:
        lacking = ", ".join(sorted(suited[-1].needs - processor_flags())) if suited else ""
        why = f"this processor lacks {lacking}" if lacking else "there is none in C at this level of processors"
        log_once(logging.INFO, f"{why}, so attention in {dtype} is torch's, which is slower")
        return False
    return True
