"""The work of packed attention in C (attention.h): tiles of consecutive rows, which are new tokens of branches.

A path segment that several rows share is one piece for all rows of a tile, which reads it once. The rest of each row's
path is a piece of its own. The kernel computes an online softmax over the pieces, so nothing is padded or merged.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from ml_dtypes import bfloat16

from tot.decoders.kernels.native.compiling import LEVELS
from tot.decoders.kernels.native.library import level, log_once
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

_Numbers = np.ndarray[Any, np.dtype[np.int32]]


class Run(NamedTuple):
    """Consecutive new tokens of one branch: row i is position `start + i` and attends to `path[: start + i + 1]`."""

    path: _Numbers
    """Slots of all positions up to the last row."""
    start: int

    @property
    def rows(self) -> int:
        return len(self.path) - self.start


class Share(NamedTuple):
    first: int
    last: int
    slots: _Numbers


class Tail(NamedTuple):
    run: int
    depth: int


def shared_prefixes(runs: Sequence[Run], worth: int) -> tuple[list[Share], list[Tail]]:
    """Find path segments that save at least `worth` keys times rows if they are computed once for several runs.

    Returns the shared segments, each with its range of tails, and the tails in packing order. The unshared part of a
    tail's run starts at position `depth`.
    """
    shares: list[Share] = []
    tails: list[Tail] = []
    heads = [run.path[: run.start] for run in runs]
    order = sorted(range(len(runs)), key=[head.tobytes() for head in heads].__getitem__)
    common = _common([heads[m] for m in order])  # sorted: equal prefixes are adjacent

    def descend(first: int, last: int, depth: int) -> None:
        within = common[first : last - 1]
        if last - first == 1 or (max(within) - depth) * (last - first - 1) < worth:  # no part is worth sharing
            tails.extend(Tail(m, depth) for m in sorted(order[first:last]))
            return
        begins, limit, share = len(tails), min(within), None
        if (limit - depth) * (last - first - 1) >= worth:
            share = heads[order[first]][depth:limit]
            depth = limit
        cuts = [first, *(i + 1 for i in range(first, last - 1) if common[i] == limit), last]
        for group in sorted(pairwise(cuts), key=lambda group: min(order[slice(*group)])):
            descend(*group, depth)
        if share is not None:
            shares.append(Share(begins, len(tails), share))

    if runs:
        descend(0, len(runs), 0)
    return shares, tails


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

    def addresses(self) -> tuple[int, int, int, int, int]:
        """Return the struct Tiles of attention.h."""
        slots, pieces, starts, rows = self
        return slots.ctypes.data, pieces.ctypes.data, starts.ctypes.data, len(starts) - 1, rows


def make_tiles(runs: Sequence[Run], window: int | None = None) -> tuple[list[int], Tiles]:
    """Split the attention of `runs` into tiles. Returns the packing order of the runs, and the tiles in row numbers.

    With a `window`, rows attend to that number of tokens, and runs keep their order."""
    if window is None:
        shares, tails = shared_prefixes(runs, _WORTH_SHARING)
    else:  # each row's window starts at another position
        shares, tails = [], [Tail(number, max(0, run.start + 1 - window)) for number, run in enumerate(runs)]
    first_row = [0]
    for tail in tails:
        first_row.append(first_row[-1] + runs[tail.run].rows)
    rows = first_row[-1]
    max_height = _MAX_ROWS if rows > _FEW_ROWS else _MAX_ROWS // 2
    height = -(-rows // -(-rows // max_height))  # tiles of nearly equal height
    pieces: list[tuple[int, int, int, int, int, int, int]] = []
    slots: list[_Numbers] = []
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


def _common(heads: Sequence[_Numbers]) -> list[int]:
    """Return the length of the prefix that each path shares with the next one."""
    width = max(map(len, heads), default=0) + 1
    table = np.empty((len(heads), width), dtype=np.int32)
    for i, head in enumerate(heads):
        table[i, : len(head)] = head
        table[i, len(head) :] = -1 - i  # unequal to any slot or other padding
    common: list[int] = (table[1:] != table[:-1]).argmax(axis=1).tolist()
    return common


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
