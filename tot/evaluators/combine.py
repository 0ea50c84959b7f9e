"""Combine: combine the values of several evaluators (RAP, section 3.2)."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from typing import Any, Literal

from pydantic import model_validator

from tot.decoders.errors import OptionError
from tot.evaluators.base import Evaluator, judge
from tot.llm.context import Context
from tot.llm.replies import NOTHING, Evaluation
from tot.task.task import Task
from tot.tree.tree import Node


class Combine(Evaluator):
    """Combine the values v of several evaluators with weights w by `rule`.

    sum      sum of w v
    product  product of v^w: RAP's r_a^alpha * r_b^(1 - alpha)
    log      sum of w ln v: the log of product, to be summed along a path
    """

    evaluators: tuple[Any, ...]
    weights: tuple[float, ...]
    rule: Literal["sum", "product", "log"] = "sum"

    @model_validator(mode="after")
    def _consistent(self) -> Combine:
        if not self.evaluators or len(self.evaluators) != len(self.weights):
            counts = f"{len(self.evaluators)} evaluators and {len(self.weights)} weights"
            raise ValueError(f"{counts}: give one weight for each evaluator")
        return self

    @property
    def compares(self) -> bool:
        return any(getattr(evaluator, "compares", False) for evaluator in self.evaluators)

    def check(self, task: Task, search: Any, generator: Any) -> None:
        for one in self.evaluators:
            if isinstance(one, Evaluator):
                one.check(task, search, generator)

    def key(self, ctx: Context, node: Node) -> Hashable | None:
        keys = tuple(evaluator.key(ctx, node) for evaluator in self.evaluators)
        return None if None in keys else (self.rule, self.weights, keys)

    async def evaluate(self, ctx: Context, nodes: Sequence[Node]) -> list[Evaluation]:
        different = [one for i, one in enumerate(self.evaluators) if one not in self.evaluators[:i]]
        evaluations = await ctx.each(different, lambda evaluator: judge(ctx, evaluator, nodes))
        columns: list[list[Evaluation]] = []
        for i, one in enumerate(self.evaluators):
            column = evaluations[different.index(one)]
            repeated = one in self.evaluators[:i]  # its usage is counted there
            columns.append([evaluation.again() for evaluation in column] if repeated else column)
        return [self._combined(parts) for parts in zip(*columns, strict=True)]

    def _combined(self, parts: tuple[Evaluation, ...]) -> Evaluation:
        usage = sum((part.usage for part in parts), NOTHING)
        failures = sum(part.parse_failures for part in parts)
        calls = tuple(call for part in parts for call in part.calls)
        values = [part.value for part in parts if part.value is not None]
        try:
            value = self._value(values) if len(values) == len(parts) else None
        except (ArithmeticError, ValueError) as error:
            raise OptionError(
                f"Combine(rule={self.rule!r}) of {values} by {list(self.weights)}: {error}; give other weights"
            ) from None
        return Evaluation(value, usage, failures, parts, calls)

    def _value(self, values: Sequence[float]) -> float:
        weighted = list(zip(values, self.weights, strict=True))
        if self.rule == "sum":
            return math.fsum(value * weight for value, weight in weighted)
        if min(values) < 0:
            raise OptionError(f"Combine(rule={self.rule!r}) of {list(values)}: values below 0 can only be summed")
        if self.rule == "product":
            return math.prod(math.pow(value, weight) for value, weight in weighted)
        return math.fsum(weight * math.log(max(value, 1e-12)) for value, weight in weighted)
