"""Self-consistency: sample whole solutions and vote (Wang et al., 2023), if asked until the vote is sure."""

from __future__ import annotations

from collections.abc import Generator
from typing import Literal, Self

from pydantic import model_validator

from tot.decoders.request import Purpose
from tot.search.base import Count, SearchState, by_value
from tot.search.baselines import WholeSolutions
from tot.search.steps import Step, Steps
from tot.search.until import VotesUntilSure
from tot.search.votes import elected
from tot.tree.tree import Node


class SelfConsistency(WholeSolutions, VotesUntilSure):
    """Sample whole solutions; return a verified answer, or the answer that most of them give.

    With `until`, stop when it is sure that more samples would not change the answer (adaptive consistency, Aggarwal et
    al., 2023; ESC, Li et al., 2024). Unfinished samples are cancelled.
    """

    samples: Count = 5
    """Number of samples; the most samples with `until`."""
    aggregate: Literal["best", "vote", "majority"] = "vote"
    at_once: Count | None = None
    """With `until`: how many samples are decoded together. None uses the number that takes little more
    time than one."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.at_once is not None and self.until is None:
            raise ValueError("at_once has an effect only with until, such as until=0.95")
        if self.until is not None and (fewest := max(2, len(self.solutions), self.at_once or 0)) > self.samples:
            raise ValueError(f"until needs at least {fewest} samples, not {self.samples}: raise samples")
        return self

    @property
    def asks_second_model(self) -> bool:
        return self.until is not None

    def steps(self, search: SearchState) -> Steps:
        if self.until is None:
            yield from super().steps(search)
            return
        root, first = search.tree.root, list[Node]()
        if search.escalates:
            if (yield from self._first_model(search)):
                return
            first = list(search.tree.children(root))
        purpose: Purpose = "escalate" if search.escalates else "generate"
        samples, requested = self.most(search), 0
        while search.solved is None:
            count = min(samples - requested, max(0, self._together(search) - search.requested.unfinished))
            requested += count
            if not (yield from self._advance(search, count, purpose)):
                return
            if first and any(search.answer_at(node) is not None for node in search.tree.children(root)[len(first) :]):
                for node in first:
                    search.tree.prune(node)
                first, search.best = [], next(iter(by_value(search.complete())))
            remaining = samples - requested + search.requested.unfinished
            if remaining == 0 or (not first and self.is_sure(self.ballots(search), remaining)):
                return

    def _first_model(self, search: SearchState) -> Generator[Step, list[Node], bool]:
        """Decode one round of samples with the first model. Return whether it is sure.

        If it is not, its answers count only until the second model has one. The vote must be as sure as if the second
        model had yet to give all of its samples (ModelSwitch, Chen et al., 2025).
        """
        count, most = self._together(search), self.most(search)
        while (yield from self._advance(search, count, "generate")):
            ballots = self.ballots(search)
            if search.solved is not None or self.is_sure(ballots, most):
                return True
            leader = elected([ballot.answer for ballot in ballots], [ballot.weight for ballot in ballots])
            hopes = [ballots[leader[0]]] * search.requested.unfinished if leader else []
            if not search.requested.unfinished or (leader and not self.is_sure([*ballots, *hopes], most)):
                break  # even if all unfinished samples agree with the leader
            count = 0
        return False

    def _together(self, search: SearchState) -> int:
        """Return how many samples are decoded at the same time."""
        return min(self.most(search), max(self.at_once or search.cheap_samples, len(self.solutions), 2))

    def _advance(self, search: SearchState, count: int, purpose: Purpose) -> Generator[Step, list[Node], bool]:
        """Request `count` more samples and wait for at least one. Return False if none has arrived."""
        received = search.requested.received
        solutions = yield search.expand([search.tree.root], count, whole=True, partial=True, purpose=purpose)
        if self.weighted and search.solved is None:
            yield search.evaluate(solutions)
        search.best = search.solved or next(iter(by_value(search.complete())), search.best)
        return search.requested.received > received
