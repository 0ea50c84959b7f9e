"""Baselines under the same interface: whole solutions written in one go, for comparisons at equal compute.

Chain of thought (Wei et al., 2022), self-consistency (Wang et al., 2023) and best of n. They ask the task's `chain`
template, not its thoughts; where there is none, a solution is one thought, and then the answer.
"""

from __future__ import annotations

from typing import Literal

from tot.decoders.errors import renamed
from tot.search.base import Count, Search, by_value
from tot.search.state import SearchState
from tot.steps import Steps


class ChainOfThought(Search):
    """One whole solution, decoded greedily."""

    whole = True

    def steps(self, search: SearchState) -> Steps:
        for chain in (yield search.expand([search.tree.root], 1, whole=True)):
            search.best = chain


class SelfConsistency(Search):
    """Some whole solutions; an answer that the task verifies, else the one that most of them give."""

    whole = True
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


class BestOfN(Search):
    """Some whole solutions; one that the task verifies, else the one that the state evaluator values most."""

    whole = True
    samples: Count = renamed("samples", "n", default=5)

    def steps(self, search: SearchState) -> Steps:
        chains = yield search.expand([search.tree.root], self.samples, whole=True)
        if search.solved is not None:
            search.best = search.solved
            return
        for chain in by_value((yield search.evaluate(chains)))[:1]:
            search.best = chain
