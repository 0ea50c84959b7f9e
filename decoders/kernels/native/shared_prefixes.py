"""Which stretches of text the rows of a packed forward share, so that each is read for all of them at once.

Runs are the new tokens of branches; nothing here knows tensors or kernels.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
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


def shared_prefixes(runs: Sequence[Run], worth: int) -> tuple[list[Share], list[Tail]]:
    """Find the stretches of path worth computing once for many runs: `worth` keys times rows saved, and more.

    Returns the shared stretches, each with the range of tails it serves, and the tails in the order in which they are
    to be packed: what a tail's run has not shared starts at `depth`.
    """
    shares: list[Share] = []
    tails: list[Tail] = []
    heads = [run.path[: run.start] for run in runs]
    order = sorted(range(len(runs)), key=[head.tobytes() for head in heads].__getitem__)
    common = _common([heads[m] for m in order])  # equal beginnings stand together now

    def descend(first: int, last: int, depth: int) -> None:
        within = common[first : last - 1]
        if last - first == 1 or (max(within) - depth) * (last - first - 1) < worth:  # nor is a part of it worth sharing
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
    """The same for layers in which a token sees `window` tokens, itself included: what a run's rows see, in the order
    of the runs. Nothing is shared, as what each row sees begins elsewhere."""
    return [], [Tail(number, max(0, run.start + 1 - window)) for number, run in enumerate(runs)]


def _common(heads: Sequence[np.ndarray[Any, np.dtype[np.int32]]]) -> list[int]:
    """How many slots each has in common with the one after it."""
    width = max(map(len, heads), default=0) + 1
    table = np.empty((len(heads), width), dtype=np.int32)
    for i, head in enumerate(heads):
        table[i, : len(head)] = head
        table[i, len(head) :] = -1 - i  # no slot, and not what another has there
    common: list[int] = (table[1:] != table[:-1]).argmax(axis=1).tolist()
    return common
