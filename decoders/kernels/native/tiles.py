"""Packed attention in C (attention.h), with AVX-512, AVX2 or NEON, in tiles of consecutive rows.

A path segment that several rows share is one piece for all rows of a tile. The rest of each row's path is a piece of
its own. The kernel computes an online softmax over the pieces, so nothing is padded or merged.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from ctypes import Structure, c_int64, c_void_p
from typing import Any, NamedTuple

import numpy as np
from ml_dtypes import bfloat16

from tot.decoders.kernels.native.compiling import LEVELS
from tot.decoders.kernels.native.library import level, log_once
from tot.decoders.kernels.native.shared_prefixes import Run, shared_prefixes, windows
from tot.decoders.machine import processor_flags

_MAX_GROUPS = 16
_MAX_HEAD_DIM = 256
_MAX_ROWS = 16
"""Maximum rows of a tile: TILE in attention.h."""
_FEW_ROWS = 24
"""Up to this number of rows, tiles have half the height, to occupy more threads."""
_NONE_HIDDEN = -(2**30)
"""The value of `hidden` if no slots are hidden."""
_WORTH_SHARING = 32
"""Minimum keys times rows saved for a piece that several rows share."""

_Numbers = np.ndarray[tuple[int, ...], np.dtype[np.int32]]


class Tiles(NamedTuple):
    """The work of the kernel. Keep a reference while the kernel runs, as it gets addresses only."""

    slots: _Numbers
    """The slots of all pieces, one after another."""
    pieces: _Numbers
    """(pieces, 6), sorted by tile; the fields of Piece in attention.h: first and last row in the tile, index of the
    first slot, visible slots of the first row, additional ones of each further row, hidden slots."""
    starts: _Numbers
    """(tiles + 1,): the first piece of each tile."""
    rows: int
    """Rows of each tile but the last."""


def make_tiles(runs: Sequence[Run], window: int | None = None) -> tuple[list[int], Tiles]:
    """Split the attention of `runs` into tiles. Returns the packing order of the runs, and the tiles in row numbers.

    With a `window`, rows attend to that number of tokens, and runs keep their order."""
    shares, tails = shared_prefixes(runs, _WORTH_SHARING) if window is None else windows(runs, window)
    first_row = [0]
    for tail in tails:
        first_row.append(first_row[-1] + runs[tail.run].rows)
    rows = first_row[-1]
    max_height = _MAX_ROWS if rows > _FEW_ROWS else _MAX_ROWS // 2
    height = -(-rows // -(-rows // max_height))  # tiles of nearly equal height
    pieces: list[tuple[int, int, int, int, int, int, int]] = []
    slots: list[np.ndarray[tuple[int], np.dtype[np.int32]]] = []
    offset = 0

    def add_piece(first: int, last: int, visible: int, step: int, hidden: int = _NONE_HIDDEN) -> None:
        """Add a piece for rows [first, last). The first sees slots [hidden, visible); both grow by `step` a row."""
        for tile in range(first // height, -(-last // height)):
            start, end = max(first, tile * height), min(last, (tile + 1) * height)
            further = step * (start - first)
            rows = start - tile * height, end - tile * height
            pieces.append((tile, *rows, offset, visible + further, step, hidden + further))

    for share in shares:
        add_piece(first_row[share.first], first_row[share.last], len(share.slots), 0)
        slots.append(share.slots)
        offset += len(share.slots)
    for tail, first, last in zip(tails, first_row, first_row[1:], strict=False):
        run = runs[tail.run]
        visible = run.start - tail.depth + 1
        add_piece(first, last, visible, 1, _NONE_HIDDEN if window is None else visible - window)
        slots.append(run.path[tail.depth :])
        offset += len(run.path) - tail.depth
    table = np.array(sorted(pieces), dtype=np.int32)
    starts = np.searchsorted(table[:, 0], np.arange(-(-rows // height) + 1)).astype(np.int32)
    order = [tail.run for tail in tails]
    return order, Tiles(np.concatenate(slots), np.ascontiguousarray(table[:, 1:]), starts, height)


class CTiles(Structure):
    """The struct Tiles of attention.h. The arrays it points to must outlive it."""

    _fields_ = [
        ("slots", c_void_p),
        ("pieces", c_void_p),
        ("starts", c_void_p),
        ("count", c_int64),
        ("rows", c_int64),
    ]

    @classmethod
    def of(cls, tiles: Tiles) -> CTiles:
        addresses = (tiles.slots.ctypes.data, tiles.pieces.ctypes.data, tiles.starts.ctypes.data)
        return cls(*addresses, len(tiles.starts) - 1, tiles.rows)


def kernels_run(head_dim: int, groups: int, dtype: np.dtype[Any], device: str) -> bool:
    """Return whether attention.h supports such a model on this processor."""
    if device != "cpu" or groups > _MAX_GROUPS or head_dim > _MAX_HEAD_DIM:
        return False
    step = 16 if dtype == np.float32 else 32
    if dtype not in (np.float32, bfloat16) or head_dim % step:
        return False
    suitable = [candidate for candidate in LEVELS if dtype == np.float32 or candidate.bfloat16]
    if level() not in suitable:
        missing = ", ".join(sorted(suitable[-1].needs - processor_flags())) if suitable else ""
        cause = f"this processor lacks {missing}" if missing else "the C kernels do not support this processor level"
        log_once(logging.INFO, f"{cause}, so torch computes in {dtype}, which is slower")
        return False
    return True
