"""State evaluators that ask nothing: what the task, the thought generator or chance says."""

from __future__ import annotations

from collections.abc import Sequence

from tot.context import Context
from tot.decoders.errors import OptionError
from tot.evaluators.base import Evaluator
from tot.tree import Node


class Heuristic(Evaluator):
    """Minus the task's own `heuristic`: the less is still to be done, the better. No model."""

    async def evaluate(self, ctx: Context, nodes: Sequence[Node]) -> list[float]:
        return [-ctx.heuristic(node) for node in nodes]


class Prior(Evaluator):
    """The thought generator's probability of the thought among its siblings."""

    async def evaluate(self, ctx: Context, nodes: Sequence[Node]) -> list[float]:
        return [_given(node.prior, "prior", "Enumerate() or Sample()") for node in nodes]


class Confidence(Evaluator):
    """The share of samples that agreed with the thought (RAP's confidence)."""

    async def evaluate(self, ctx: Context, nodes: Sequence[Node]) -> list[float]:
        return [_given(node.confidence, "confidence", "Sample(samples=8)") for node in nodes]


class Random(Evaluator):
    """A number drawn uniformly from [0, 1): what any evaluator has to beat."""

    async def evaluate(self, ctx: Context, nodes: Sequence[Node]) -> list[float]:
        return [ctx.random("value", ctx.tree.place(node)).random() for node in nodes]


def _given(value: float | None, what: str, generators: str) -> float:
    if value is None:
        raise OptionError(f"the thought generator gives no {what}: use {generators}")
    return value
