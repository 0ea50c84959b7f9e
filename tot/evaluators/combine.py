"""State evaluators that ask no model of their own: what the task, the thought or chance says, and mixtures of these."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Hashable, Sequence
from dataclasses import replace
from typing import Any, Literal

from pydantic import model_validator

from tot.decoders.errors import OptionError
from tot.decoders.request import Usage
from tot.evaluators.model import Evaluator
from tot.search.session import Problem
from tot.steps import Evaluation
from tot.tree import Node


class Heuristic(Evaluator):
    """Minus the task's own `heuristic`: the less is still to be done, the better. No model."""

    async def evaluate(self, problem: Problem, nodes: Sequence[Node]) -> list[Evaluation]:
        return [Evaluation(-problem.growth.heuristic(node)) for node in nodes]


class Prior(Evaluator):
    """The thought generator's probability of the thought among its siblings."""

    async def evaluate(self, problem: Problem, nodes: Sequence[Node]) -> list[Evaluation]:
        return [Evaluation(_given(node.prior, "prior", "Enumerate() or Sample()")) for node in nodes]


class Confidence(Evaluator):
    """The share of samples that agreed with the thought (RAP's confidence)."""

    async def evaluate(self, problem: Problem, nodes: Sequence[Node]) -> list[Evaluation]:
        return [Evaluation(_given(node.confidence, "confidence", "Sample(votes=8)")) for node in nodes]


class Random(Evaluator):
    """A number drawn uniformly from [0, 1): what any evaluator has to beat."""

    async def evaluate(self, problem: Problem, nodes: Sequence[Node]) -> list[Evaluation]:
        return [Evaluation(problem.growth.random("value", problem.tree.place(node)).random()) for node in nodes]


class Combine(Evaluator):
    """Several evaluators' values v with weights w, made one by `rule`.

    sum      sum of w v
    product  product of v^w: RAP's r_a^alpha * r_b^(1 - alpha)
    log      sum of w ln v: the same, as log-likelihoods that may be added along a path
    """

    parts: tuple[Any, ...]
    weights: tuple[float, ...]
    rule: Literal["sum", "product", "log"] = "sum"

    @model_validator(mode="after")
    def _consistent(self) -> Combine:
        if not self.parts or len(self.parts) != len(self.weights):
            raise ValueError(f"{len(self.parts)} parts and {len(self.weights)} weights: give one weight for each part")
        return self

    def key(self, problem: Problem, node: Node) -> Hashable | None:
        keys = tuple(part.key(problem, node) for part in self.parts)
        return None if None in keys else (self.rule, self.weights, keys)

    async def evaluate(self, problem: Problem, nodes: Sequence[Node]) -> list[Evaluation]:
        different = [part for i, part in enumerate(self.parts) if part not in self.parts[:i]]
        judged = await asyncio.gather(*(problem.judge(part, nodes) for part in different))
        columns = [judged[different.index(part)] for part in self.parts]
        for i, part in enumerate(self.parts):
            if part in self.parts[:i]:  # asked once, paid for once
                columns[i] = [
                    replace(evaluation, usage=Usage(), parse_failures=0, calls=()) for evaluation in columns[i]
                ]
        return [self._combined(parts) for parts in zip(*columns, strict=True)]

    def _combined(self, parts: tuple[Evaluation, ...]) -> Evaluation:
        usage = sum((part.usage for part in parts), Usage())
        failures = sum(part.parse_failures for part in parts)
        calls = tuple(call for part in parts for call in part.calls)
        values = [part.value for part in parts if part.value is not None]
        if len(values) < len(parts):
            return Evaluation(None, usage, failures, parts, calls)
        try:
            return Evaluation(self._value(values), usage, failures, parts, calls)
        except (ArithmeticError, ValueError) as error:
            raise OptionError(
                f"Combine(rule={self.rule!r}) of {values} by {list(self.weights)}: {error}; give other weights"
            ) from None

    def _value(self, values: Sequence[float]) -> float:
        weighted = list(zip(values, self.weights, strict=True))
        if self.rule == "sum":
            return math.fsum(value * weight for value, weight in weighted)
        if min(values) < 0:
            raise OptionError(f"Combine(rule={self.rule!r}) of {list(values)}: values below 0 can only be summed")
        if self.rule == "product":
            return math.prod(math.pow(value, weight) for value, weight in weighted)
        return math.fsum(weight * math.log(max(value, 1e-12)) for value, weight in weighted)


def _given(value: float | None, what: str, generators: str) -> float:
    if value is None:
        raise OptionError(f"the thought generator gives no {what}: use {generators}")
    return value
