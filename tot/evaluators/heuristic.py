"""State evaluators without a model call: from the task, the generator, logprobs, or at random."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from itertools import accumulate
from typing import Annotated, Any

from pydantic import Field

from tot.decoders.errors import OptionError
from tot.evaluators.base import Evaluator
from tot.llm.context import Context
from tot.task.checked import CheckedTask
from tot.task.task import Task
from tot.task.world import HasHeuristic, HasMeasured
from tot.tree.thought import State
from tot.tree.tree import Node


class Heuristic(Evaluator):
    """The negated `heuristic` of the task: the lower the remaining cost, the higher the value."""

    def check(self, task: Task, search: Any, generator: Any) -> None:
        if not isinstance(task, HasHeuristic):
            CheckedTask(task).heuristic(State(question=""))  # raises

    async def evaluate(self, ctx: Context, nodes: Sequence[Node]) -> list[float]:
        return [0.0 - ctx.heuristic(node) for node in nodes]


class Measured(Evaluator):
    """The value that the task measured when it executed the thought; none if it failed."""

    def check(self, task: Task, search: Any, generator: Any) -> None:
        if not isinstance(task, HasMeasured):
            CheckedTask(task).measured(State(question=""))  # raises

    async def evaluate(self, ctx: Context, nodes: Sequence[Node]) -> list[float | None]:
        return [ctx.measured(node) for node in nodes]


class Prior(Evaluator):
    """The thought generator's probability of the thought among its siblings."""

    async def evaluate(self, ctx: Context, nodes: Sequence[Node]) -> list[float]:
        return [_require(node.prior, "prior", "Enumerate() or Sample()") for node in nodes]


class Confidence(Evaluator):
    """The share of samples that agreed with the thought (RAP's confidence)."""

    def check(self, task: Task, search: Any, generator: Any) -> None:
        if search.whole:
            raise OptionError(
                f"whole solutions of {type(search).__name__} have no confidence: choose another evaluator, such as "
                "evaluator='vote'"
            )
        if not getattr(generator, "has_confidence", True) or getattr(generator, "samples", None) == 1:
            raise OptionError(
                "the thought generator returns no confidence: use Sample(samples=8) (generator='sample:samples=8')"
            )

    async def evaluate(self, ctx: Context, nodes: Sequence[Node]) -> list[float]:
        return [_require(node.confidence, "confidence", "Sample(samples=8)") for node in nodes]


class LogProb(Evaluator):
    """The geometric mean of the probabilities of the path's sampled tokens, from 0 to 1."""

    window: Annotated[int, Field(ge=1)] | None = None
    """Use only the least likely window of consecutive tokens, of this length; None uses all tokens."""

    async def evaluate(self, ctx: Context, nodes: Sequence[Node]) -> list[float]:
        values = [self.of(ctx.state(node)) for node in nodes]
        if None in values:
            warnings.warn(
                "the thought generator returns no log-probabilities, so logprob gives all thoughts the same value, and "
                "votes count equally: use Sample() or Continue(), with logprobs=true for a server, or another "
                "evaluator",
                stacklevel=2,
            )
        return [1.0 if value is None else value for value in values]

    def of(self, state: State) -> float | None:
        """Return the value of a path, or None if the log-probabilities of its tokens are unknown."""
        drawn = [part for thought in state.thoughts for part in thought.drawn.values()]
        logprobs = [logprob for part in drawn for logprob in part.logprobs]
        if not logprobs:
            return None
        width = min(self.window or len(logprobs), len(logprobs))
        sums = [0.0, *accumulate(logprobs)]
        return math.exp(min(end - begin for begin, end in zip(sums, sums[width:], strict=False)) / width)


class Random(Evaluator):
    """A random number, uniform in [0, 1): the baseline for any evaluator."""

    async def evaluate(self, ctx: Context, nodes: Sequence[Node]) -> list[float]:
        return [ctx.random("value", ctx.tree.place(node)).random() for node in nodes]


def _require(value: float | None, what: str, generators: str) -> float:
    if value is None:
        raise OptionError(f"the thought generator returns no {what}: use {generators}")
    return value
