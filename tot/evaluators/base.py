"""Evaluator: base of the state evaluators; and of those that ask a template about each state."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

from pydantic import BaseModel, ConfigDict

from tot.decoders.request import Message
from tot.llm.context import Context
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
