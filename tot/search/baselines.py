"""Baselines under the same interface, for comparisons at equal compute: each sample is a whole solution.

Chain of thought (Wei et al., 2022), self-consistency (Wang et al., 2023) and best of n. They use the task's `chain`
template instead of its thought templates. Without a `chain` template, a solution is one thought and then the answer.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import field_validator

from tot.search.base import Count, Search, SearchState, by_value
from tot.search.steps import Steps
from tot.task.task import Task
from tot.tree.tree import Node

_WAVE = 32
"""Samples decoded together under a budget, which cuts samples that are not finished."""


class Solutions(Search):
    """A search that samples whole solutions."""

    whole = True
    solutions: tuple[str, ...] = ()
    """Templates to sample solutions from, in turn, as in "chain+program". The default is the task's `chain`."""
    samples: Count = 1

    @field_validator("solutions", mode="before")
    @classmethod
    def _by_name(cls, given: Any) -> Any:
        return tuple(given.split("+")) if isinstance(given, str) else given

    def most(self, search: SearchState) -> int:
        """Return the number of samples. Greedy decoding gives one per template: copies are not further votes."""
        return self.samples if search.resources.distinct is None else min(self.samples, search.resources.distinct)


class WholeSolutions(Solutions):
    """Sample a number of whole solutions. The other classes of this module are presets of this one."""

    weighted: bool = False
    """Evaluate the solutions with the state evaluator: it ranks them and weights their votes."""

    def evaluates(self, task: Task) -> bool:
        return self.weighted

    def steps(self, search: SearchState) -> Steps:
        samples = self.most(search)
        wave = min(samples, _WAVE) if search.resources.budgeted else samples
        solutions: list[Node] = []
        for first in range(0, samples, wave):
            drafts = yield search.expand([search.tree.root], min(wave, samples - first), whole=True)
            if self.weighted and search.solved is None:
                drafts = yield search.evaluate(drafts)
            solutions = by_value([*solutions, *drafts]) if self.weighted else [*solutions, *drafts]
            search.best = search.solved or next(iter(solutions), search.best)
            if search.solved is not None:
                return


class ChainOfThought(WholeSolutions):
    """Sample one whole solution, decoded greedily unless a temperature is given."""


class SelfConsistency(WholeSolutions):
    """Sample whole solutions; return a verified answer, or the answer that most of them give."""

    samples: Count = 5
    aggregate: Literal["best", "vote", "majority"] = "vote"


class BestOfN(WholeSolutions):
    """Sample whole solutions; return a verified one, or the one with the highest value."""

    samples: Count = 5
    weighted: bool = True


class Act(Search):
    """Follow one path, always taking the generator's first thought. The path may revisit states."""

    expands = wanders = True

    def evaluates(self, task: Task) -> bool:
        return False

    def steps(self, search: SearchState) -> Steps:
        while not search.is_end(search.best):
            children = yield search.expand([search.best], 1)
            if not children:
                return
            search.best = children[0]
