"""Baselines under the same interface: whole solutions written in one go, for comparisons at equal compute.

Chain of thought (Wei et al., 2022), self-consistency (Wang et al., 2023) and best of n. They ask the task's `chain`
template, not its thoughts; where there is none, a solution is one thought, and then the answer.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import field_validator

from tot.decoders.errors import renamed
from tot.search.base import Count, Search, SearchState, Steps, by_value


class _Whole(Search):
    whole = True
    solutions: tuple[str, ...] = ()
    """Templates that take turns in asking for a solution, as in "chain+program"; by default the task's `chain`."""

    @field_validator("solutions", mode="before")
    @classmethod
    def _by_name(cls, given: Any) -> Any:
        return tuple(given.split("+")) if isinstance(given, str) else given


class ChainOfThought(_Whole):
    """One whole solution, decoded greedily unless a temperature is given."""

    def steps(self, search: SearchState) -> Steps:
        for chain in (yield search.expand([search.tree.root], 1, whole=True)):
            search.best = chain


class SelfConsistency(_Whole):
    """Some whole solutions; an answer that the task verifies, else the one that most of them give."""

    samples: Count = renamed("samples", "k", default=5)
    aggregate: Literal["best", "vote", "majority"] = "vote"
    weighted: bool = False
    """Each vote counts as much as the state evaluator values its solution."""

    def steps(self, search: SearchState) -> Steps:
        chains = yield search.expand([search.tree.root], self.samples, whole=True)
        if self.weighted and search.solved is None:
            chains = by_value((yield search.evaluate(chains)))
        for chain in chains[:1]:
            search.best = chain


class BestOfN(_Whole):
    """Some whole solutions; one that the task verifies, else the one that the state evaluator values most."""

    samples: Count = renamed("samples", "n", default=5)

    def steps(self, search: SearchState) -> Steps:
        chains = yield search.expand([search.tree.root], self.samples, whole=True)
        if search.solved is not None:
            search.best = search.solved
            return
        for chain in by_value((yield search.evaluate(chains)))[:1]:
            search.best = chain


class Act(Search):
    """One path, of the thought generator's first thought each time, which may lead back to where it has been."""

    wanders = True

    def steps(self, search: SearchState) -> Steps:
        while not search.is_end(search.best):
            children = yield search.expand([search.best], 1)
            if not children:
                return
            search.best = children[0]
