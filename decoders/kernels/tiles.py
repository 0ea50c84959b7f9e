"""Packed attention cut for the kernel in C: tiles of consecutive rows, and what the rows of each see.

Stretches of text that several rows share are one piece for all of a tile's rows; the rest of each row's path is a piece
of its own. The kernel takes softmax as it goes through the pieces, so nothing is padded and nothing merged.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from tot.decoders.kernels.shared_prefixes import Run, shared_prefixes

_ROWS = 16
"""Of a tile, at most: TILE in attention.c."""
_FEW = 24
"""Up to so many rows tiles are half as high, so that there are some for more threads."""
_WORTH_SHARING = 32
"""Keys times rows saved from which a stretch is a piece for several rows."""

_Numbers = np.ndarray[tuple[int, ...], np.dtype[np.int32]]


class Tiles(NamedTuple):
    """What the kernel goes through. Keep it while it runs: it is given addresses."""

    slots: _Numbers
    """The slots of all pieces, one after another."""
    pieces: _Numbers
    """(pieces, 5): first and last row in the tile, where its slots begin, how many of them its first row sees, and how
    many more each further row does. Those of a tile stand together."""
    starts: _Numbers
    """(tiles + 1,) the first piece of each."""
    rows: int
    """Of each tile but the last."""


def make_tiles(runs: Sequence[Run]) -> tuple[list[int], Tiles]:
    """Cut the attention of `runs`. Returns the packing order of the runs, and the tiles in row numbers."""
    shares, tails = shared_prefixes(runs, _WORTH_SHARING)
    first_row = [0]
    for tail in tails:
        first_row.append(first_row[-1] + runs[tail.run].rows)
    rows = first_row[-1]
    most = _ROWS if rows > _FEW else _ROWS // 2
    height = -(-rows // -(-rows // most))  # all as high as each other, or nearly
    pieces: list[tuple[int, int, int, int, int, int]] = []
    slots: list[np.ndarray[tuple[int], np.dtype[np.int32]]] = []
    offset = 0

    def piece(first: int, last: int, seen: int, step: int) -> None:
        """Rows `first` up to `last`; the first sees `seen` slots, each further one `step` more."""
        for tile in range(first // height, -(-last // height)):
            start, end = max(first, tile * height), min(last, (tile + 1) * height)
            here = seen + step * (start - first)
            pieces.append((tile, start - tile * height, end - tile * height, offset, here, step))

    for share in shares:
        piece(first_row[share.first], first_row[share.last], len(share.slots), 0)
        slots.append(share.slots)
        offset += len(share.slots)
    for tail, first, last in zip(tails, first_row, first_row[1:], strict=False):
        run = runs[tail.run]
        piece(first, last, run.start - tail.depth + 1, 1)
        slots.append(run.path[tail.depth :])
        offset += len(run.path) - tail.depth
    table = np.array(sorted(pieces), dtype=np.int32)
    starts = np.searchsorted(table[:, 0], np.arange(-(-rows // height) + 1)).astype(np.int32)
    order = [tail.run for tail in tails]
    return order, Tiles(np.concatenate(slots), np.ascontiguousarray(table[:, 1:]), starts, height)
