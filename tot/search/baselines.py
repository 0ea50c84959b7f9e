"""Baselines under the same interface: whole solutions written in one go, for comparisons at equal compute.

Chain of thought (Wei et al., 2022), self-consistency (Wang et al., 2023) and best of n. They ask the task's `chain`
template, not its thoughts; where there is none, a solution is one thought, and then the answer.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import field_validator

from tot.search.base import Count, Search, SearchState, by_value
from tot.search.steps import Steps


class WholeSolutions(Search):
    """Some whole solutions; the three classes below are presets of it."""

    whole = True
    solutions: tuple[str, ...] = ()
    """Templates that take turns in asking for a solution, as in "chain+program"; by default the task's `chain`."""
    samples: Count = 1
    weighted: bool = False
    """Have the state evaluator value the solutions: the most valuable first, and votes by value."""

    @field_validator("solutions", mode="before")
    @classmethod
    def _by_name(cls, given: Any) -> Any:
        return tuple(given.split("+")) if isinstance(given, str) else given

    def steps(self, search: SearchState) -> Steps:
        solutions = yield search.expand([search.tree.root], self.samples, whole=True)
        if self.weighted and search.solved is None:
            solutions = by_value((yield search.evaluate(solutions)))
        search.best = search.solved or next(iter(solutions), search.best)


class ChainOfThought(WholeSolutions):
    """One whole solution, decoded greedily unless a temperature is given."""


class SelfConsistency(WholeSolutions):
    """Some whole solutions; an answer that the task verifies, else the one that most of them give."""

    samples: Count = 5
    aggregate: Literal["best", "vote", "majority"] = "vote"


class BestOfN(WholeSolutions):
    """Some whole solutions; one that the task verifies, else the one that the state evaluator values most."""

    samples: Count = 5
    weighted: bool = True


class Act(Search):
    """One path, of the thought generator's first thought each time, which may lead back to where it has been."""

    wanders = True

    def steps(self, search: SearchState) -> Steps:
        while not search.is_end(search.best):
            children = yield search.expand([search.best], 1)
            if not children:
                return
            search.best = children[0]
