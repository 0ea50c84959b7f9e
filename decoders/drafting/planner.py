"""What speculation may gain: how often drafted tokens were accepted so far, against what their rows cost.

A drafted token is worth its row where the time that the row adds brings more tokens than the same time brings without
it. So the length and the breadth of drafts follow from two measurements, the cost of a forward by its rows and the
share of drafts accepted, and where packing alone fills the machine nothing is drafted. What is decided about a token
never depends on the token itself, or rejection rules would no longer keep the distribution.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

NEAR, FAR = 128, 1024
"""Tokens of context that costs are measured at."""
_WEIGHT = 2.0
_GUESS = 0.5
"""What is not known yet counts as this many trials, of which this share was accepted."""
_MEMORY = 200.0
"""Trials that count in full; older ones fade."""
_MARGIN = 1.2
"""A forward of the draft must promise so many times what it costs: what is expected is uncertain, its cost is not."""
_CARRIED = 20.0
"""Trials that count of what was learned before this decoder was made: other texts may be another matter."""
_FADES = 0.995
"""What was learned fades a little with every step that teaches nothing new, so that it will be tried again."""


@dataclass(frozen=True)
class LatencyModel:
    """Seconds of one forward by its rows, between the points measured and beyond them in straight lines."""

    rows: tuple[int, ...]
    seconds: tuple[float, ...]
    """Where each row sees NEAR tokens or fewer."""
    more: tuple[float, ...] = ()
    """Seconds that each token of context beyond NEAR adds, by the same rows; empty where that is not known."""

    def of(self, rows: int) -> float:
        if len(self.rows) == 1:
            return self.seconds[0]
        at = self._piece(rows)
        return self.seconds[at] + self.slope(rows) * (rows - self.rows[at])

    def slope(self, rows: int) -> float:
        """Seconds that one more row adds."""
        if len(self.rows) == 1:
            return 0.0
        at = self._piece(rows)
        return (self.seconds[at + 1] - self.seconds[at]) / (self.rows[at + 1] - self.rows[at])

    def at(self, context: float) -> LatencyModel:
        """The costs where rows see so many tokens, on average."""
        beyond = context - NEAR
        if not self.more or beyond <= 0:
            return self
        return LatencyModel(
            self.rows, tuple(near + beyond * more for near, more in zip(self.seconds, self.more, strict=True))
        )

    def _piece(self, rows: int) -> int:
        return min(max(0, bisect_right(self.rows, rows) - 1), len(self.rows) - 2)

    @classmethod
    def fit(cls, near: Sequence[tuple[int, float]], far: Sequence[tuple[int, float]] = ()) -> LatencyModel:
        """From (rows, seconds) pairs at a context of NEAR tokens, and some of these rows at FAR. More rows never cost
        less, nor does more context: where a measurement says so, it is the noise."""
        rows, seconds = _rising(near)
        costs = cls(rows, seconds)
        if not far:
            return costs
        further = cls(*_rising([(count, max(0.0, value - costs.of(count)) / (FAR - NEAR)) for count, value in far]))
        return cls(rows, seconds, tuple(max(0.0, further.of(count)) for count in rows))


def _rising(measured: Sequence[tuple[int, float]]) -> tuple[tuple[int, ...], tuple[float, ...]]:
    rows, values = zip(*sorted(measured), strict=True)
    return rows, tuple(accumulate(values, max))


@dataclass(slots=True)
class _Share:
    tried: float = 0.0
    accepted: float = 0.0
    step: int = 0


@dataclass
class AcceptanceStatistics:
    """Which share of drafted tokens of each kind was accepted."""

    step: int = 0
    _shares: dict[Hashable, _Share] = field(default_factory=dict)

    def chance(self, kind: Hashable) -> float:
        """How likely a token of that kind is accepted, where the one before it is."""
        share = self._shares.get(kind)
        if share is None:
            return _GUESS
        kept = _FADES ** (self.step - share.step)
        return (share.accepted * kept + _GUESS * _WEIGHT) / (share.tried * kept + _WEIGHT)

    def learn(self, kind: Hashable, accepted: bool) -> None:
        share = self._shares.setdefault(kind, _Share(step=self.step))
        kept = _FADES ** (self.step - share.step) * min(1.0, _MEMORY / (share.tried + 1.0))
        share.tried = share.tried * kept + 1.0
        share.accepted = share.accepted * kept + accepted
        share.step = self.step

    def to_json(self) -> list[list[Any]]:
        """[kind, trials, of them accepted], as faded by now."""
        found = []
        for kind, share in list(self._shares.items()):  # it may still be learning
            kept = _FADES ** (self.step - share.step)
            found.append([kind, share.tried * kept, share.accepted * kept])
        return found

    @classmethod
    def from_json(cls, learned: Sequence[Sequence[Any]]) -> AcceptanceStatistics:
        """What `to_json` gave, after a round trip too. Raises ValueError or TypeError for anything else."""
        experience = cls()
        for kind, tried, accepted in learned:
            if not 0.0 <= accepted <= tried < math.inf:
                raise ValueError(f"{accepted} of {tried} trials accepted")
            kept = min(1.0, _CARRIED / max(tried, 1.0))
            experience._shares[_kind(kind)] = _Share(tried * kept, accepted * kept)
        return experience


def _kind(read: Any) -> Hashable:
    """JSON knows no tuples."""
    return tuple(map(_kind, read)) if isinstance(read, list | tuple) else read


class SpeculationPlanner:
    """One step's plan, while it is drafted for: the tokens it may bring, the rows it verifies, the seconds it takes."""

    def __init__(
        self,
        experience: AcceptanceStatistics,
        target: LatencyModel,
        draft: LatencyModel | None,
        branches: int,
        pace: float = 1.0,
    ) -> None:
        self.experience = experience
        self.drafting = 0.0
        """Seconds of the draft's forwards."""
        self._target = target
        self._draft = draft
        self._pace = pace
        self._tokens = float(branches)
        self._rows = branches

    def take(self, plan: SpeculationPlanner) -> None:
        """Go on as planned there, in what began as a copy of this plan."""
        self._tokens, self._rows, self.drafting = plan._tokens, plan._rows, plan.drafting

    @property
    def rate(self) -> float:
        """Tokens a second, as things stand."""
        return self._tokens / (self._target.of(self._rows) + self.drafting)

    def admit(self, chance: float) -> bool:
        """Whether a token that is accepted with that chance is worth its row; if so it is part of the plan."""
        if chance <= self.rate * self._target.slope(self._rows):
            return False
        self._tokens += chance
        self._rows += 1
        return True

    def invest(self, kind: Hashable, rows: int) -> bool:
        """Whether rows that bring a token with the chance kept under `kind`, but none themselves, pay."""
        chance = self.experience.chance(kind)
        if chance <= self.rate * (self._target.of(self._rows + rows) - self._target.of(self._rows)):
            return False
        self._tokens += chance
        self._rows += rows
        return True

    def deepen(self, kind: Hashable, reached: Sequence[float]) -> bool:
        """Whether another forward of the draft pays, that goes on from nodes reached with these chances. `kind`: what
        the share of nodes so deep, after which something was accepted, is kept under."""
        if not reached:
            return False
        seconds = 0.0 if self._draft is None else self._pace * self._draft.of(len(reached))
        floor = self.rate * self._target.slope(self._rows)
        share = self.experience.chance(kind)
        if sum(max(0.0, chance * share - floor) for chance in reached) <= _MARGIN * seconds * self.rate:
            return False
        self.drafting += seconds
        return True
