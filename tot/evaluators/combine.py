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

    product  product of v^w: RAP's r_a^alpha * r_b^(1 - alpha)
    log      sum of w ln v: the log of product, to be summed along a path
    """

    evaluators: tuple[Any, ...]
    weights: tuple[float, ...]
    rule: Literal["product", "log"] = "product"

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
        columns = await ctx.each(self.evaluators, lambda evaluator: judge(ctx, evaluator, nodes))
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
                f"Combine(rule={self.rule!r}) of {values} by {list(self.weights)}: {error}; give other weights or "
                "evaluators"
            ) from None
        return Evaluation(value, usage, failures, parts, calls)

    def _value(self, values: Sequence[float]) -> float:
        weighted = list(zip(values, self.weights, strict=True))
        if min(values) < 0:
            raise ValueError("values below 0 have no product")
        if self.rule == "product":
            return math.prod(math.pow(value, weight) for value, weight in weighted)
        return math.fsum(weight * math.log(max(value, 1e-12)) for value, weight in weighted)
