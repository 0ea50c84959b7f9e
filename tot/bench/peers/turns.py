"""Turns: sides take turns at the same work, and what they took is kept by side, column and round.

A cell is one side at one column: a number of branches, or of thoughts. Round by round all sides do a column's work one
after another, in another order every time. What takes too long is done once, or not at all, by one rule for all.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import psutil

from tot.bench.peers.side import Side, Work
from tot.bench.peers.waves import Wave, rows

NOT_AT_ALL = 3.0
"""A cell predicted to take longer than the patience is done in the first round only; one predicted to take so many
times as long is not done."""

WARM_UP = 0.25
"""A cell is warmed up where that is predicted to take no longer than this share of the patience: those that take
longer gain nothing from it."""


BUSY = 20.0
"""Percent of all processors, above which somebody is at work."""


def wait_until_quiet(most: float = 5.0) -> None:
    """What a side still does after its answer (some servers poll for a second) is not to slow the next one: wait for
    that, up to `most` seconds."""
    end = time.monotonic() + most
    while psutil.cpu_percent(interval=0.25) > BUSY and time.monotonic() < end:
        pass


@dataclass(slots=True)
class Results:
    """What sides took: `works[side][column][round]`."""

    columns: Sequence[int]
    works: dict[str, dict[int, dict[int, Work]]] = field(default_factory=dict)
    skipped: dict[str, dict[int, float]] = field(default_factory=dict)
    """Cells never done, and the seconds that each was predicted to take."""
    failed: dict[str, str] = field(default_factory=dict)
    """Sides that could not go on, and why."""

    def of(self, side: str, column: int) -> dict[int, Work]:
        """A cell's work by round; empty where it was not done."""
        return self.works.get(side, {}).get(column, {})

    def rates(self, side: str, column: int) -> list[float]:
        """New tokens a second, by round."""
        return [work.rate for _, work in sorted(self.of(side, column).items())]

    def seconds(self, side: str, column: int) -> list[float]:
        return [work.seconds for _, work in sorted(self.of(side, column).items())]

    def ratios(self, ours: str, theirs: str, column: int) -> list[float]:
        """How many times as long theirs took as ours, in each round that both did."""
        mine, other = self.of(ours, column), self.of(theirs, column)
        return [other[turn].seconds / mine[turn].seconds for turn in sorted(mine.keys() & other.keys())]

    def fastest(self, sides: Iterable[str], column: int) -> str | None:
        """The side with the best median rate at a column; None where none did it."""
        done = [side for side in sides if self.of(side, column)]
        return max(done, key=lambda side: statistics.median(self.rates(side, column)), default=None)


Asking = Callable[[int, int], Sequence[Wave]]
"""(column, round) -> the waves to run."""


class Turns:
    """Sides at work. `patience` is in seconds; `say` is told of every cell, `settle` is called before it."""

    def __init__(
        self,
        sides: Sequence[Side],
        columns: Sequence[int],
        patience: float,
        say: Callable[[str], None],
        settle: Callable[[], None] = wait_until_quiet,
    ) -> None:
        self.sides = list(sides)
        """Those that can still go on."""
        self.results = Results(columns)
        self._patience = patience
        self._say = say
        self._settle = settle
        self._last: dict[str, dict[int, tuple[float, int]]] = {}
        """Seconds and rows of each cell when it was last done."""

    def warm_up(self, asking: Asking) -> None:
        """Do every cell once, uncounted, with what `asking` gives for round 0: less than the rounds do. What it takes
        is what round 0 is predicted from."""
        for column in self.results.columns:
            for side in self._asked(column, 0):
                if self._predicted(side, column, asking(column, 0)) <= WARM_UP * self._patience:
                    self._run(side, column, asking(column, 0))

    def round(self, turn: int, asking: Asking) -> None:
        """One round: every column, and in it every side."""
        for column in self.results.columns:
            waves = asking(column, turn)
            for side in self._asked(column, turn):
                predicted = self._predicted(side, column, waves)
                if predicted > self._patience * (1 if turn else NOT_AT_ALL):
                    if not turn:
                        self.results.skipped.setdefault(side.name, {})[column] = predicted
                        self._say(f"round {turn + 1}: {side.name}, {column}: not done, it would take {predicted:.0f} s")
                elif work := self._run(side, column, waves):
                    self.results.works.setdefault(side.name, {}).setdefault(column, {})[turn] = work
                    did = f"{work.seconds:.1f} s, {work.rate:.1f} tokens/s"
                    self._say(f"round {turn + 1}: {side.name}, {column}: {did}")

    def _asked(self, column: int, turn: int) -> list[Side]:
        """The sides that a column is a question for, in the order of a round."""
        asked = [side for side in self.sides if side.most is None or column <= side.most]
        first = turn % len(asked) if asked else 0
        return [*asked[first:], *asked[:first]]

    def _predicted(self, side: Side, column: int, waves: Sequence[Wave]) -> float:
        """Seconds, in proportion to rows, from the cell itself or the largest that was done; 0 where none was."""
        last = self._last.get(side.name)
        if not last:
            return 0.0
        seconds, before = last[column if column in last else max(last)]
        return seconds * rows(waves) / before

    def _run(self, side: Side, column: int, waves: Sequence[Wave]) -> Work | None:
        """The work done, or None where the side failed; it is not asked again."""
        self._settle()
        try:
            work = side.run(waves)
        except Exception as error:  # a peer may fail in any way, and the others go on  # noqa: BLE001
            self.results.failed[side.name] = str(error) or type(error).__name__
            self._say(f"{side.name} failed: {self.results.failed[side.name]}")
            self.sides.remove(side)
            return None
        self._last.setdefault(side.name, {})[column] = work.seconds, rows(waves)
        return work
