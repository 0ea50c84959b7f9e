"""Evaluator: base of the state evaluators; and of those that ask a template about each state."""

from __future__ import annotations

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
"""What each label is worth."""


class Evaluator(BaseModel):
    """Options of a state evaluator; `evaluate` is what it does. An object with these methods will do as well."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    @property
    def layers(self) -> tuple[int, ...]:
        """Of the model that writes thoughts, those whose hidden states at the ends of texts this reads."""
        return ()

    def key(self, ctx: Context, node: Node) -> Hashable | None:
        """Nodes with equal keys get one evaluation between them, once a search; None, the default, is never shared."""
        return None

    @abstractmethod
    async def evaluate(self, ctx: Context, nodes: Sequence[Node]) -> Sequence[Any]:
        """The value of each node: a number, None or an Evaluation."""


class TemplateEvaluator(Evaluator):
    """Asks a template about each state; states with equal prompts are the same state."""

    template: str | None = None
    """The task's `value` template where it is None."""

    def asked(self, task: Task) -> str:
        return self.template or task.value

    def prompt(self, task: Task, state: State) -> tuple[Message, ...]:
        """What is asked about a state."""
        return task.prompt(self.asked(task), state, **state.thoughts[-1].parts)

    def key(self, ctx: Context, node: Node) -> Hashable | None:
        return type(self).__name__, repr(self), self.prompt(ctx.task, ctx.state(node))


def labels_of(labels: Labels | None, task: Task) -> Labels:
    """Labels and what they are worth: those given, the task's own, or the numbers of its scale."""
    low, high = task.scale
    return labels or task.labels or {str(number): number for number in range(low, high + 1)}


async def judge(ctx: Context, evaluator: Evaluator, nodes: Sequence[Node]) -> list[Evaluation]:
    """An evaluation for each node; nodes of equal keys have one between them, which is paid for once."""
    with user_code(f"{type(evaluator).__name__}.key"):
        keys = [object() if (key := evaluator.key(ctx, node)) is None else key for node in nodes]
        set(keys)
    new: dict[Hashable, Node] = {}
    for key, node in zip(keys, nodes, strict=True):
        if key not in ctx.evaluations:
            new.setdefault(key, node)
    what = f"{type(evaluator).__name__}.evaluate"
    with user_code(what):
        found = list(await evaluator.evaluate(ctx, list(new.values()))) if new else []
    if len(found) != len(new):
        raise TaskError(f"{what} gave {len(found)} values for {len(new)} nodes: give one for each")
    paid = dict(zip(new, map(as_evaluation, found), strict=True))
    ctx.evaluations.update({key: evaluation.again() for key, evaluation in paid.items()})
    return [paid.pop(key) if key in paid else ctx.evaluations[key] for key in keys]


def remember(ctx: Context, evaluator: Evaluator, nodes: Sequence[Node], evaluations: Sequence[Evaluation]) -> None:
    """Keep evaluations of an earlier run as if `judge` had asked for them."""
    for node, evaluation in zip(nodes, evaluations, strict=True):
        key = evaluator.key(ctx, node)
        if key is not None and evaluation.value is not None:
            ctx.evaluations.setdefault(key, evaluation.again())
    for i, one in enumerate(getattr(evaluator, "evaluators", ())):  # a mixture's evaluations have theirs as parts
        remember(ctx, one, nodes, [evaluation.parts[i] for evaluation in evaluations])
