"""Auto: sample from several sources, and stop when the answer is sure or more samples gain too little.

The rules, with the numbers of a `Calibration`:

1. Each source has one greedy sample first, the one with the fewest tokens first: a written answer, a program.
2. Then the sources take turns in the same order.
3. `together` samples are decoded at the same time. When one ends, the answers have new probabilities. The search stops,
   and drops the unfinished samples, when the most probable answer has the probability `until`, or is verified. It
   begins no sample whose expected gain is below `gain`.
4. If there is a larger model (`escalate`), the first model begins `together` samples only. If no answer is sure then,
   the larger model begins, and the first model's answers count until it has one.

The answer is always the most probable one so far.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Field

from tot.decoders.errors import OptionError
from tot.decoders.request import Purpose
from tot.sandbox import can_confine
from tot.search.base import WRITERS, Count, SearchState
from tot.search.baselines import Solutions
from tot.search.best_first import BestFirst
from tot.search.bfs import BFS
from tot.search.calibration import Calibration, general, template_of
from tot.search.refine import Refine
from tot.search.steps import Steps
from tot.search.votes import Ballot, cast, count, source_of
from tot.task.checked import CheckedTask
from tot.task.task import Task
from tot.task.world import HasAct, HasActions
from tot.tree.tree import Node


class Auto(Solutions):
    """Spend the time where it pays on this task.

    A task with a `chain` template or programs: sample solutions by the rules of this module. A task with actions:
    best-first. A task that executes its thoughts: refine. Others: BFS.
    """

    aggregate: Literal["vote"] = "vote"
    samples: Count = 8
    """The most samples of a model."""
    until: Annotated[float, Field(gt=0, le=1)] = 0.95
    """Stop when the answer is right with this probability."""
    gain: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Begin no sample that is expected to raise the probability by less."""
    together: Count | None = None
    """Number of samples decoded at the same time. None uses the number that takes little more time than one."""

    @property
    def asks_second_model(self) -> bool:
        return True

    def recipe(self, task: Task, generator: Any) -> dict[str, Any]:
        programs = CheckedTask(task).programs
        templates = self.solutions or [name for name in ("chain", *programs) if name in task.prompts]
        sources = [name for name in templates if name not in programs or can_confine()] or self.solutions
        if self.solutions or (sources and not isinstance(task, HasActions)):
            return {"search": self.model_copy(update={"solutions": tuple(dict.fromkeys(sources))})}
        search = BestFirst() if isinstance(task, HasActions) else Refine() if isinstance(task, HasAct) else BFS()
        if given := sorted(self.model_fields_set):
            name = type(search).__name__
            raise OptionError(f"auto is {name} for the task {task.name}, without {', '.join(given)}: leave them out")
        return {"search": search}

    def steps(self, search: SearchState) -> Steps:
        purposes = WRITERS if search.resources.escalates else WRITERS[:1]
        for purpose in purposes:
            samples = _Samples(self, search, purpose, most=purpose != purposes[-1])
            yield search.fork(*(samples.branch() for _ in range(samples.together)))
            if samples.sure:
                return

    def elect(self, search: SearchState, answered: Sequence[tuple[Node, Any]]) -> tuple[list[Ballot], list[int]]:
        ballots, _ = cast(search.checked, search.tree.question, answered, equal=True)
        if not ballots:
            return [], []
        found = calibration(search).probabilities(ballots, samples_of(search))
        votes = Counter(ballot.answer for ballot in ballots)
        weights = [found[ballot.answer] / votes[ballot.answer] for ballot in ballots]
        keys, winners = count(search.checked, search.tree.question, [answer for _, answer in answered], weights)
        sources = [ballot.source for ballot in ballots]
        return [Ballot(*ballot) for ballot in zip(keys, weights, sources, strict=True)], winners


def calibration(search: SearchState) -> Calibration:
    """Return the calibration of the model whose samples vote."""
    return search.resources.calibrations.get(search.voting) or general()


def expected_gain(search: SearchState, probability: float) -> float:
    """Return how much one more sample is expected to raise the probability of the answer."""
    return calibration(search).gain(samples_of(search).total(), probability)


def samples_of(search: SearchState) -> Counter[str]:
    """Return the number of samples of the voting model by source, also of samples without an answer."""
    calls, voting = search.tree.calls, search.voting
    nodes = [node for node in search.complete() if node.parent is not None]
    own = [node for node in nodes if all(call.purpose == voting for call in calls.get(node.id, ())[:1])]
    # A text that can't be read is no node: its call is the root's.
    unread = [call.template for call in calls.get(search.tree.root.id, ()) if call.purpose == voting]
    return Counter(unread) + Counter(template_of(source_of(node)) for node in own)


class _Samples:
    """The samples of one model."""

    def __init__(self, options: Auto, search: SearchState, purpose: Purpose, most: bool) -> None:
        """With `most`, begin only the samples that are decoded at the same time."""
        self.options, self.search, self.purpose = options, search, purpose
        self.solutions = options.solutions or ("chain",)
        limit = options.most(search)
        self.together = min(limit, max(options.together or search.resources.cheap_samples, 1))
        self.sure = False
        """Whether the search can stop."""
        self._limit = self.together if most else limit
        self._calibration = search.resources.calibrations.get(purpose) or general()
        self._begun: Counter[str] = Counter()
        self._probability = 0.0
        """Of the best answer."""
        self._earlier = list(search.tree.children(search.tree.root))
        """Solutions of the first model, which count until this one has an answer."""

    def branch(self) -> Steps:
        """Sample solutions, one after another. Return True to cancel the other branches."""
        search, solutions = self.search, self.solutions
        while (source := self._next()) is not None:
            number = self._begun[source] * len(solutions) + solutions.index(source)
            greedy = not self._begun[source]
            self._begun[source] += 1
            yield search.expand(
                [search.tree.root], 1 if greedy else self._limit + 1, True, number, purpose=self.purpose
            )
            self._receive()
            if self.sure:
                return True
        return False

    def _next(self) -> str | None:
        """Return the source of the next sample; None to begin no more."""
        if self._begun.total() >= self._limit:
            return None
        source = min(self.solutions, key=lambda name: (self._begun[name], self._calibration.source(name).tokens))
        gain = self._calibration.gain(self._begun.total(), self._probability)
        return source if gain >= self.options.gain or not self._begun[source] else None

    def _receive(self) -> None:
        """Update the best answer after a sample has ended. Others may have ended at the same time."""
        search = self.search
        new = [node for node in search.tree.children(search.tree.root) if node not in self._earlier]
        if self._earlier and any(search.answer_at(node) is not None for node in new):
            for node in self._earlier:
                search.tree.prune(node)
            self._earlier = []
        if not self._earlier:
            search.voting = self.purpose
        answered = [(node, answer) for node in search.complete() if (answer := search.answer_at(node)) is not None]
        ballots, winners = self.options.elect(search, answered)
        if winners:
            search.best = search.solved or answered[winners[0]][0]
            self._probability = math.fsum(ballots[i].weight for i in winners)
        self.sure = search.solved is not None or self._probability >= self.options.until
