"""Self-consistency: sample whole solutions and vote (Wang et al., 2023), if asked until the vote is sure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, Self

from pydantic import model_validator

from tot.decoders.request import Purpose
from tot.search.base import Count, SearchState, by_value
from tot.search.baselines import WholeSolutions
from tot.search.steps import Steps
from tot.search.votes import Ballot, VotesUntilSure
from tot.task.call_votes import elected

VOTE: Mapping[str, Any] = {"search": "self-consistency:samples=8,weighted=true", "until": 0.95}
"""The options of a vote that stops when it is sure."""


class SelfConsistency(WholeSolutions, VotesUntilSure):
    """Sample whole solutions; return a verified answer, or the answer that most of them give.

    With `until`, each sample is a branch, and the vote stops when it is sure that more samples would not change the
    answer (adaptive consistency, Aggarwal et al., 2023; ESC, Li et al., 2024). Unfinished samples are cancelled.
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
        vote = _Vote(self, search)
        if search.resources.escalates:
            yield search.fork(*(vote.ask_first(number) for number in range(vote.together)))
            if vote.sure:
                return
            vote.begin_second()
        yield search.fork(*(vote.ask() for _ in range(vote.together)))


class _Vote:
    """The samples of one search."""

    def __init__(self, options: SelfConsistency, search: SearchState) -> None:
        self.options, self.search = options, search
        self.most = options.most(search)
        """The most samples of one model."""
        self.together = min(
            self.most, max(options.at_once or search.resources.cheap_samples, len(options.solutions), 2)
        )
        """How many samples are decoded at the same time."""
        self.sure = False
        """Whether the first model decides alone."""
        self._purpose: Purpose = "generate"
        self._numbers = iter(range(self.most))
        self._received = 0
        self._first = 0
        """Number of solutions of the first model that count only until the second model has an answer."""

    def ask(self) -> Steps:
        """Sample solutions, one after another, until the vote is sure. Return True to cancel the others."""
        search = self.search
        for number in self._numbers:
            yield from self._sample(number)
            solutions = search.tree.children(search.tree.root)
            if self._first and any(search.answer_at(node) is not None for node in solutions[self._first :]):
                for node in solutions[: self._first]:
                    search.tree.prune(node)
                self._first, search.best = 0, next(iter(by_value(search.complete())))
            if search.solved is not None or (
                not self._first and self.options.is_sure(self._ballots, self.most - self._received)
            ):
                return self._end()
        return False

    def ask_first(self, number: int) -> Steps:
        """Sample a solution of the first model. Return True if it decides, or can't become sure any more.

        The vote must be as sure as if the second model had yet to give all of its samples (ModelSwitch, Chen et al.,
        2025). If it is not, the answers count only until the second model has one.
        """
        yield from self._sample(number)
        ballots = self._ballots
        self.sure = self.search.solved is not None or self.options.is_sure(ballots, self.most)
        leader = elected([ballot.answer for ballot in ballots], [ballot.weight for ballot in ballots])
        hopes = [ballots[i] for i in leader[:1]] * (self.together - self._received)
        # Stop even the unfinished samples if the vote would not be sure with all of them for the leader.
        if self.sure or (leader and not self.options.is_sure([*ballots, *hopes], self.most)):
            return self._end()
        return False

    def begin_second(self) -> None:
        """Begin the samples of the second model."""
        self._first = len(self.search.tree.children(self.search.tree.root))
        self._purpose, self._numbers, self._received = "escalate", iter(range(self.most)), 0

    def _sample(self, number: int) -> Steps:
        """Sample one solution, and evaluate it if the votes are weighted."""
        search = self.search
        new = yield search.expand([search.tree.root], 1, whole=True, sample=number, purpose=self._purpose)
        if self.options.weighted and search.solved is None:
            yield search.evaluate(new)
        self._received += 1
        search.best = search.solved or next(iter(by_value(search.complete())), search.best)

    @property
    def _ballots(self) -> list[Ballot]:
        return self.options.ballots(self.search, evaluated=self.options.weighted)

    def _end(self) -> bool:
        """Exclude solutions without a value from a weighted vote, and return True."""
        if self.options.weighted and self.search.solved is None:
            for node in self.search.tree.children(self.search.tree.root):
                if node.value is None:
                    self.search.tree.prune(node)
        return True
