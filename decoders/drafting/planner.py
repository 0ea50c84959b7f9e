"""What speculation may gain: how often drafted tokens were accepted so far, against what their rows cost.

A drafted token is worth its row where the time that the row adds brings more tokens than the same time brings without
it. So the length and the breadth of drafts follow from two measurements, the latency of a forward by its rows and the
share of drafts accepted, and where packing alone fills the machine nothing is drafted. What is decided about a token
never depends on the token itself, or rejection rules would no longer keep the distribution. What is expected may be
wrong in ways that only time tells: a trial by the clock decides whether to draft at all.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from tot.decoders.drafting.latency_model import LatencyModel

_WEIGHT = 2.0
_GUESS, _OF_A_MODEL = 0.5, 0.8
"""What is not known yet counts as so many trials, of which this share was accepted; of what a model drafts the second,
as what is not tried is never known to be good."""
_FORGETS = 0.995
"""What was learned counts so much less with every step, so that what was given up is tried again."""
_MARGIN = 1.2
"""A forward of the draft must promise so many times what it costs: what is expected is uncertain, its cost is not."""
_TRIAL = 6
"""Steps of a way that is being tried."""
_BLOCKS = 60, 960
"""Steps of the faster way before the other is tried again: twice as many each time that it has won again."""
_REGRET = 0.02
"""Trials that are lost may take this share of the time: the blocks between them are as long as that asks for."""
_LONGEST = 8000
"""Steps of such a block, at most."""
_FADES = 0.97
"""Older steps of a way count less."""
_INTERRUPTED = 4.0
"""A step counts as at most so many times as long as usual: it was interrupted by something else, a long prompt say."""


class AcceptanceStatistics:
    """Which share of drafted tokens of each kind was accepted. The kind of what a model drafted, or of a forward of
    it, is a tuple that begins with "model" or "level"."""

    def __init__(self) -> None:
        self.step = 0
        self._trials: dict[Hashable, tuple[float, float, int]] = {}
        """By kind: how many, how many of them accepted, and as of which step."""

    def chance(self, kind: Hashable) -> float:
        """How likely a token of that kind is accepted, where the one before it is."""
        tried, accepted = self._as_of_now(kind)
        drafted = isinstance(kind, tuple) and kind[0] in ("model", "level")
        return (accepted + (_OF_A_MODEL if drafted else _GUESS) * _WEIGHT) / (tried + _WEIGHT)

    def learn(self, kind: Hashable, accepted: bool) -> None:
        tried, before = self._as_of_now(kind)
        self._trials[kind] = tried + 1.0, before + accepted, self.step

    def _as_of_now(self, kind: Hashable) -> tuple[float, float]:
        tried, accepted, step = self._trials.get(kind, (0.0, 0.0, self.step))
        left = _FORGETS ** (self.step - step)
        return tried * left, accepted * left


class SpeculationPlanner:
    """One step's plan, while it is drafted for: the tokens it may bring, the rows it verifies, the seconds it takes."""

    def __init__(
        self,
        statistics: AcceptanceStatistics,
        target: LatencyModel,
        draft: LatencyModel | None,
        branches: int,
        pace: float = 1.0,
    ) -> None:
        self.statistics = statistics
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
        chance = self.statistics.chance(kind)
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
        share = self.statistics.chance(kind)
        if sum(max(0.0, chance * share - floor) for chance in reached) <= _MARGIN * seconds * self.rate:
            return False
        self.drafting += seconds
        return True


@dataclass
class _Way:
    steps: float = 0.0
    tokens: float = 0.0
    seconds: float = 0.0


class Trial:
    """Which of two ways to take in the next step, by what every step so far brought and took: the faster one is kept,
    and the other tried again now and then. The first trial of drafting is against the measured latency of a plain
    forward, so that what clearly pays is never left out."""

    def __init__(self, plain: float | None) -> None:
        """`plain`: seconds that a step without drafts, one token a branch, is thought to take; None: try both ways."""
        self.drafts = True
        """Or what else the first way is."""
        self._ways = {True: _Way(), False: _Way() if plain is None else _Way(1.0, 1.0, plain)}
        self._left = _TRIAL
        self._block = _BLOCKS[0]
        self._won: bool | None = None
        self._trying = True
        self._changed = True
        self._tried = _Way()
        """What the trial under way brought and took."""

    def step(self, tokens: float, seconds: float, drafting: float = 0.0) -> None:
        """A step of the present way brought so many tokens a branch, and took so many seconds besides those of
        drafting. The first one after a change tells nothing of the way: the draft catches up with what it has not
        seen."""
        self._changed, changed = False, self._changed
        way = self._ways[self.drafts]
        if way.steps:
            seconds = min(seconds, _INTERRUPTED * way.seconds / way.steps)
        seconds += drafting
        if self._trying:
            self._tried.tokens += tokens
            self._tried.seconds += seconds
        if changed:
            return
        way.steps = way.steps * _FADES + 1
        way.tokens = way.tokens * _FADES + tokens
        way.seconds = way.seconds * _FADES + seconds
        self._left -= 1
        if self._left:
            return
        if not self._trying or not all(way.steps for way in self._ways.values()):
            self._change(not self.drafts)
            self._left, self._trying, self._tried = _TRIAL, True, _Way()
            return
        first, second = self._ways[True], self._ways[False]
        self._change(first.tokens * second.seconds > second.tokens * first.seconds)  # tokens a second
        self._block = min(2 * self._block, _BLOCKS[1]) if self.drafts == self._won else _BLOCKS[0]
        self._left, self._trying, self._won = self._block, False, self.drafts
        kept = self._ways[self.drafts]
        if kept.steps > 1 and kept.seconds > 0:  # it was measured
            lost = self._tried.seconds - self._tried.tokens * kept.seconds / kept.tokens
            self._left = max(self._left, min(_LONGEST, round(lost / (_REGRET * kept.seconds / kept.steps))))

    def _change(self, drafts: bool) -> None:
        self._changed = drafts != self.drafts
        self.drafts = drafts
