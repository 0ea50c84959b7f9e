"""Prefixes that the rows of a packed forward pass share, so that attention reads each once for all of these rows.

Runs are the new tokens of branches. This file is independent of tensors and kernels.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np


class Run(NamedTuple):
    """Consecutive new tokens of one branch: row i is position `start + i` and attends to `path[: start + i + 1]`."""

    path: np.ndarray[Any, np.dtype[np.int32]]
    """Slots of all positions up to the last row."""
    start: int

    @property
    def rows(self) -> int:
        return len(self.path) - self.start


class Share(NamedTuple):
    first: int
    last: int
    slots: np.ndarray[Any, np.dtype[np.int32]]


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


def windows(runs: Sequence[Run], window: int) -> tuple[list[Share], list[Tail]]:
    """Return the shared segments and tails for layers with a sliding window of `window` tokens.

    Nothing is shared, as each row's window starts at another position. Tails are in the order of the runs."""
    return [], [Tail(number, max(0, run.start + 1 - window)) for number, run in enumerate(runs)]


def _common(heads: Sequence[np.ndarray[Any, np.dtype[np.int32]]]) -> list[int]:
    """Return the length of the prefix that each path shares with the next one."""
    width = max(map(len, heads), default=0) + 1
    table = np.empty((len(heads), width), dtype=np.int32)
    for i, head in enumerate(heads):
        table[i, : len(head)] = head
        table[i, len(head) :] = -1 - i  # unequal to any slot or other padding
    common: list[int] = (table[1:] != table[:-1]).argmax(axis=1).tolist()
    return common
