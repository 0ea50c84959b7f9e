"""Which stretches of text the rows of a packed forward share, so that each is read for all of them at once.

Runs are the new tokens of branches; nothing here knows tensors or kernels.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np


class Run(NamedTuple):
    """Consecutive new tokens of one branch: row i is position `start + i` and sees `path[: start + i + 1]`."""

    path: np.ndarray[Any, np.dtype[np.int32]]
    """Slots of positions 0 up to the last row."""
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


def cascade(runs: Sequence[Run], worth: int) -> tuple[list[Share], list[Tail]]:
    """Find the stretches of path worth computing once for many runs: `worth` keys times rows saved, and more.

    Returns the shared stretches, each with the range of tails it serves, and the tails in the order in which they are
    to be packed: what a tail's run has not shared starts at `depth`.
    """
    shares: list[Share] = []
    tails: list[Tail] = []

    def descend(members: list[int], depth: int, seen: int) -> None:
        first = len(tails)
        if len(members) == 1:
            tails.append(Tail(members[0], depth))
            return
        limit = min(runs[m].start for m in members)
        stretch = np.stack([runs[m].path[seen:limit] for m in members])
        differs = np.flatnonzero((stretch != stretch[0]).any(axis=0))
        common = seen + int(differs[0]) if len(differs) else limit
        share = None
        if (common - depth) * (len(members) - 1) >= worth:
            share = runs[members[0]].path[depth:common]
            depth = common
        groups: dict[object, list[int]] = defaultdict(list)
        for m in members:
            groups[int(runs[m].path[common]) if runs[m].start > common else ("ends", m)].append(m)
        for group in groups.values():
            descend(group, depth, common)
        if share is not None:
            shares.append(Share(first, len(tails), share))

    if runs:
        descend(list(range(len(runs))), 0, 0)
    return shares, tails
