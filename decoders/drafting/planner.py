"""Plan speculation: weigh the acceptance rate of drafted tokens against the cost of their rows.

A drafted token is worth its row if the time that the row adds yields more tokens than the same time without it. So two
measurements set the length and breadth of drafts: the latency of a forward by rows, and the share of drafts accepted.
Nothing is drafted if packing alone fills the machine. A decision about a token never depends on the token itself,
because rejection rules would then change the distribution. Plain steps also show which lookup drafts would have been
accepted; the statistics of other drafts fade, so that an abandoned one is tried again.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from tot.decoders.drafting.latency_model import LatencyModel

_PRIOR_TRIALS = 2.0
_PRIOR, _MODEL_PRIOR = 0.5, 0.8
"""Prior of an unknown kind: a number of pseudo-trials, and the share of them accepted. Tokens of a draft model have a
higher share, because a kind that is never tried cannot prove itself."""
_STATISTICS_DECAY = 0.995
"""Decay of the statistics per step, so that an abandoned kind is tried again."""
_MARGIN = 1.2
"""Required ratio of a draft forward's expected gain to its cost: the gain is uncertain, the cost is not."""
_DOUBT = 0.3
"""Share of the estimated seconds that a draft's forward has to be worth while few of its forwards were timed."""


class AcceptanceStatistics:
    """Share of drafted tokens accepted, by kind.

    The kind of a draft model's token or forward is a tuple that begins with "model" or "level".
    """

    def __init__(self) -> None:
        self.step = 0
        self._trials: dict[Hashable, tuple[float, float, int]] = {}
        """By kind: number of trials, number accepted, and the step of the last update."""

    def chance(self, kind: Hashable) -> float:
        """Return the probability that a token of this kind is accepted, given that the token before it is."""
        trials, accepted = self._decayed(kind)
        drafted = isinstance(kind, tuple) and kind[0] in ("model", "level")
        return (accepted + (_MODEL_PRIOR if drafted else _PRIOR) * _PRIOR_TRIALS) / (trials + _PRIOR_TRIALS)

    def learn(self, kind: Hashable, accepted: bool) -> None:
        """Count one trial of a kind."""
        trials, accepted_before = self._decayed(kind)
        self._trials[kind] = trials + 1.0, accepted_before + accepted, self.step

    def _decayed(self, kind: Hashable) -> tuple[float, float]:
        trials, accepted, step = self._trials.get(kind, (0.0, 0.0, self.step))
        decay = _STATISTICS_DECAY ** (self.step - step)
        return trials * decay, accepted * decay


class SpeculationPlanner:
    """The plan of one step during drafting: its expected tokens, rows to verify, and seconds."""

    def __init__(
        self,
        statistics: AcceptanceStatistics,
        target: LatencyModel,
        draft: LatencyModel | None,
        branches: int,
        distinct: int | None = None,
    ) -> None:
        """`distinct`: number of different texts among the branches, by default all; equal texts share their rows."""
        self.statistics = statistics
        self.drafting = 0.0
        """Expected seconds of the draft's forwards."""
        self._target = target
        self._draft = draft
        self._tokens = float(branches)
        self._rows = float(distinct or branches)
        self._share = self._rows / branches
        """Rows per branch, for drafted tokens as well: drafts of equal texts are mostly equal."""

    def take(self, plan: SpeculationPlanner) -> None:
        """Adopt `plan`, which began as a copy of this plan."""
        self._tokens, self._rows, self.drafting = plan._tokens, plan._rows, plan.drafting

    @property
    def seconds(self) -> float:
        """Expected seconds of the plan so far."""
        return self._target.of(self._rows) + self.drafting

    @property
    def rate(self) -> float:
        """Expected tokens per second of the plan so far."""
        return self._tokens / self.seconds

    def admit(self, chance: float) -> bool:
        """Add a token with this acceptance chance to the plan if it is worth its row. Return whether it is."""
        if chance <= self.rate * self._target.slope(self._rows) * self._share:
            return False
        self._tokens += chance
        self._rows += self._share
        return True

    def invest(self, kind: Hashable, rows: int) -> bool:
        """Add rows that are never accepted but yield a token with the chance of `kind`. Return whether they pay."""
        chance = self.statistics.chance(kind)
        if chance <= self.rate * (self._target.of(self._rows + rows) - self._target.of(self._rows)):
            return False
        self._tokens += chance
        self._rows += rows
        return True

    def deepen(self, kind: Hashable, reached: Sequence[float], timed: bool = True) -> bool:
        """Add another draft forward from nodes reached with these chances, if it pays. Return whether it does.

        `kind` is the statistics key for nodes at this depth: the share after which a token was accepted. A draft that
        was not `timed` yet is given the benefit of the doubt, because an estimate that prevents it is never corrected.
        """
        if not reached:
            return False
        rows = max(1.0, len(reached) * self._share)
        seconds = 0.0 if self._draft is None else self._draft.of(rows)
        floor = self.rate * self._target.slope(self._rows) * self._share
        accepted = self.statistics.chance(kind)
        gain = sum(max(0.0, chance * accepted - floor) for chance in reached)
        if gain <= _MARGIN * (1.0 if timed else _DOUBT) * seconds * self.rate:
            return False
        self.drafting += seconds
        return True
