"""What speculation may gain: how often drafted tokens were accepted so far, against what their rows cost.

A drafted token is worth its row where the time that the row adds brings more tokens than the same time brings without
it. So the length and the breadth of drafts follow from two measurements, the cost of a forward by its rows and the
share of drafts accepted, and where packing alone fills the machine nothing is drafted. What is decided about a token
never depends on the token itself, or rejection rules would no longer keep the distribution.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

_WEIGHT = 2.0
_GUESS = 0.5
"""What is not known yet counts as this many trials, of which this share was accepted."""
_MEMORY = 200.0
"""Trials that count in full; older ones fade."""
_MARGIN = 1.2
"""A forward of the draft must promise so many times what it costs: what is expected is uncertain, its cost is not."""
_FADES = 0.995
"""What was learned fades a little with every step that teaches nothing new, so that it will be tried again."""


@dataclass(frozen=True)
class Costs:
    """Seconds of one forward by its rows, between the points measured and beyond them in straight lines."""

    rows: tuple[int, ...]
    seconds: tuple[float, ...]

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

    def _piece(self, rows: int) -> int:
        return min(max(0, bisect_right(self.rows, rows) - 1), len(self.rows) - 2)

    @classmethod
    def fit(cls, measured: Sequence[tuple[int, float]]) -> Costs:
        """From (rows, seconds) pairs. More rows never cost less: where a measurement says so, it is the noise."""
        rows, seconds = zip(*sorted(measured), strict=True)
        highest, rising = 0.0, []
        for value in seconds:
            highest = max(highest, value)
            rising.append(highest)
        return cls(rows, tuple(rising))


@dataclass(slots=True)
class _Share:
    tried: float = 0.0
    accepted: float = 0.0
    step: int = 0


@dataclass
class Experience:
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


class Outlook:
    """One step's plan, while it is drafted for: the tokens it may bring, the rows it verifies, the seconds it takes."""

    def __init__(
        self, experience: Experience, target: Costs, draft: Costs | None, branches: int, pace: float = 1.0
    ) -> None:
        self.experience = experience
        self.drafting = 0.0
        """Seconds of the draft's forwards."""
        self._target = target
        self._draft = draft
        self._pace = pace
        self._tokens = float(branches)
        self._rows = branches

    @property
    def _rate(self) -> float:
        """Tokens a second, as things stand."""
        return self._tokens / (self._target.of(self._rows) + self.drafting)

    def admit(self, chance: float) -> bool:
        """Whether a token that is accepted with that chance is worth its row; if so it is part of the plan."""
        if chance <= self._rate * self._target.slope(self._rows):
            return False
        self._tokens += chance
        self._rows += 1
        return True

    def invest(self, kind: Hashable, rows: int) -> bool:
        """Whether rows that bring a token with the chance kept under `kind`, but none themselves, pay."""
        chance = self.experience.chance(kind)
        if chance <= self._rate * (self._target.of(self._rows + rows) - self._target.of(self._rows)):
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
        floor = self._rate * self._target.slope(self._rows)
        share = self.experience.chance(kind)
        if sum(max(0.0, chance * share - floor) for chance in reached) <= _MARGIN * seconds * self._rate:
            return False
        self.drafting += seconds
        return True
