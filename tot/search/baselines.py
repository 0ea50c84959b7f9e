"""Baselines under the same interface, for comparisons at equal compute: each sample is a whole solution.

Chain of thought (Wei et al., 2022), self-consistency (Wang et al., 2023) and best of n. They use the task's `chain`
template instead of its thought templates. Without a `chain` template, a solution is one thought and then the answer.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from tot.search.base import Count, Search, SearchState, by_value
from tot.search.steps import Steps
from tot.search.votes import stays_ahead


class WholeSolutions(Search):
    """Sample whole solutions. `ChainOfThought`, `SelfConsistency` and `BestOfN` are presets of this class."""

    whole = True
    solutions: tuple[str, ...] = ()
    """Templates to sample solutions from, in turn, as in "chain+program". The default is the task's `chain`."""
    samples: Count = 1
    weighted: bool = False
    """Evaluate the solutions with the state evaluator: it ranks them and weights their votes."""

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
    """Sample one whole solution, decoded greedily unless a temperature is given."""


class SelfConsistency(WholeSolutions):
    """Sample whole solutions; return a verified answer, or the answer that most of them give.

    With `until`, stop when it is sure that more samples would not change the answer (adaptive consistency, Aggarwal et
    al., 2023; ESC, Li et al., 2024). Unfinished samples are cancelled.
    """

    samples: Count = 5
    """Number of samples; the most samples with `until`."""
    aggregate: Literal["best", "vote", "majority"] = "vote"
    until: Annotated[float, Field(gt=0, le=1)] | None = None
    """Stop when the posterior that the leading answer stays ahead with all samples reaches this (`stays_ahead`)."""
    at_once: Count | None = None
    """With `until`: how many samples are decoded together. None: as many as cost little more time than one."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.until is not None and self.aggregate == "best":
            raise ValueError("until counts votes: set aggregate to vote or majority")
        if self.at_once is not None and self.until is None:
            raise ValueError("at_once has an effect only with until, such as until=0.95")
        if self.until is not None and (fewest := max(2, len(self.solutions), self.at_once or 0)) > self.samples:
            raise ValueError(f"until needs at least {fewest} samples, not {self.samples}: raise samples")
        return self

    def steps(self, search: SearchState) -> Steps:
        if self.until is None:
            yield from super().steps(search)
            return
        root, requested = search.tree.root, 0
        together = max(self.at_once or search.cheap_samples, len(self.solutions), 2)
        while search.solved is None:
            unfinished = search.unfinished
            count = min(self.samples - requested, max(0, together - unfinished))
            requested += count
            solutions = yield search.expand([root], count, whole=True, partial=True)
            if self.weighted and search.solved is None:
                yield search.evaluate(solutions)
            solutions = search.tree.children(root)
            search.best = search.solved or next(iter(by_value(solutions)), search.best)
            if search.unfinished == unfinished + count:  # nothing arrived, and nothing will
                return
            remaining = self.samples - requested + search.unfinished
            ballots = search.ballots(solutions)
            if remaining == 0 or (len(ballots) > 1 and stays_ahead(ballots, remaining) >= self.until):
                return


class BestOfN(WholeSolutions):
    """Sample whole solutions; return a verified one, or the one with the highest value."""

    samples: Count = 5
    weighted: bool = True


class Act(Search):
    """Follow one path, always taking the generator's first thought. The path may revisit states."""

    wanders = True

    def steps(self, search: SearchState) -> Steps:
        while not search.is_end(search.best):
            children = yield search.expand([search.best], 1)
            if not children:
                return
            search.best = children[0]
