"""Evaluator: the base class of state evaluators. TemplateEvaluator: of evaluators that use a template."""

from __future__ import annotations

import asyncio
from abc import abstractmethod
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

from pydantic import BaseModel, ConfigDict

from tot.decoders.errors import TaskError
from tot.decoders.request import Message
from tot.llm.context import Context
from tot.llm.replies import Evaluation, as_evaluation
from tot.task.checked import user_code
from tot.task.task import Task
from tot.tree.thought import State
from tot.tree.tree import Node

Labels = Mapping[str, float]
"""The value of each label."""


class Evaluator(BaseModel):
    """A state evaluator and its options. Any object with these methods can be used instead."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    @property
    def compares(self) -> bool:
        """Whether a value depends on other branches, so that these must not run ahead."""
        return False

    def check(self, task: Task, search: Any, generator: Any) -> None:
        """Raise OptionError or TaskError if the task or another part lacks something that it needs."""

    def key(self, ctx: Context, node: Node) -> Hashable | None:
        """Return a key; nodes with equal keys share one evaluation per search. None, the default, is never shared."""
        return None

    @abstractmethod
    async def evaluate(self, ctx: Context, nodes: Sequence[Node]) -> Sequence[Any]:
        """Return the value of each node: a number, None or an Evaluation."""


class TemplateEvaluator(Evaluator):
    """Evaluator with a template for each state. States with equal prompts share one evaluation."""

    template: str = "value"

    def check(self, task: Task, search: Any, generator: Any) -> None:
        task.prompts.require(self.template)

    def prompt(self, task: Task, state: State) -> tuple[Message, ...]:
        """Render the prompt for a state."""
        return task.prompt(self.template, state, **state.thoughts[-1].outputs)

    def key(self, ctx: Context, node: Node) -> Hashable | None:
        return type(self).__name__, repr(self), self.prompt(ctx.task, ctx.state(node))


def labels_of(labels: Labels | None, task: Task) -> Labels:
    """Return labels with their values: the given ones, the task's labels, or the numbers of its scale."""
    low, high = task.scale
    return labels or task.labels or {str(number): number for number in range(int(low), int(high) + 1)}


async def judge(ctx: Context, evaluator: Evaluator, nodes: Sequence[Node]) -> list[Evaluation]:
    """Return an evaluation for each node. Nodes with equal keys share one evaluation; its usage counts once."""
    with user_code(f"{type(evaluator).__name__}.key"):
        keys = [object() if (key := evaluator.key(ctx, node)) is None else key for node in nodes]
        set(keys)
    while others := {ctx.evaluating[key] for key in keys if key in ctx.evaluating}:
        await asyncio.wait(others)  # other branches of the search evaluate equal states
    new: dict[Hashable, Node] = {}
    for key, node in zip(keys, nodes, strict=True):
        if key not in ctx.evaluations:
            new.setdefault(key, node)
    method = f"{type(evaluator).__name__}.evaluate"
    evaluated = asyncio.get_running_loop().create_future()
    ctx.evaluating.update(dict.fromkeys(new, evaluated))
    try:
        with user_code(method):
            results = list(await evaluator.evaluate(ctx, list(new.values()))) if new else []
    finally:
        evaluated.set_result(None)
        for key in new:
            del ctx.evaluating[key]
    if len(results) != len(new):
        raise TaskError(f"{method} returned {len(results)} values for {len(new)} nodes: return one per node")
    evaluations = dict(zip(new, map(as_evaluation, results), strict=True))
    ctx.evaluations.update({key: evaluation.again() for key, evaluation in evaluations.items()})
    return [evaluations.pop(key) if key in evaluations else ctx.evaluations[key] for key in keys]


def remember(ctx: Context, evaluator: Evaluator, nodes: Sequence[Node], evaluations: Sequence[Evaluation]) -> None:
    """Cache evaluations of an earlier run, as `judge` does."""
    for node, evaluation in zip(nodes, evaluations, strict=True):
        key = evaluator.key(ctx, node)
        if key is not None and evaluation.value is not None:
            ctx.evaluations.setdefault(key, evaluation.again())
    for i, one in enumerate(getattr(evaluator, "evaluators", ())):  # Combine keeps their evaluations as parts
        remember(ctx, one, nodes, [evaluation.parts[i] for evaluation in evaluations])
