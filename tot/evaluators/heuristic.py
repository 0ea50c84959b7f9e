"""State evaluators that ask nothing: what the task, the thought generator, the text itself, other branches or chance
say."""

from __future__ import annotations

import math
import warnings
from collections.abc import Hashable, Sequence
from itertools import accumulate
from typing import Annotated

from pydantic import Field

from tot.decoders.errors import OptionError
from tot.evaluators.base import Evaluator
from tot.llm.context import Context
from tot.tree.thought import State
from tot.tree.tree import Node


class Heuristic(Evaluator):
    """Minus the task's own `heuristic`: the less is still to be done, the better. No model."""

    async def evaluate(self, ctx: Context, nodes: Sequence[Node]) -> list[float]:
        return [0.0 - ctx.heuristic(node) for node in nodes]


class Prior(Evaluator):
    """The thought generator's probability of the thought among its siblings."""

    async def evaluate(self, ctx: Context, nodes: Sequence[Node]) -> list[float]:
        return [_given(node.prior, "prior", "Enumerate() or Sample()") for node in nodes]


class Confidence(Evaluator):
    """The share of samples that agreed with the thought (RAP's confidence)."""

    async def evaluate(self, ctx: Context, nodes: Sequence[Node]) -> list[float]:
        return [_given(node.confidence, "confidence", "Sample(samples=8)") for node in nodes]


class LogProb(Evaluator):
    """The probability of a token of the path's texts, as the model drew them (geometric mean, from 0 to 1)."""

    window: Annotated[int, Field(ge=1)] | None = None
    """Of the least likely so many tokens in a row; None: of all."""

    async def evaluate(self, ctx: Context, nodes: Sequence[Node]) -> list[float]:
        values = [self.of(ctx.state(node)) for node in nodes]
        if None in values:
            warnings.warn(
                "the thought generator gives no log-probabilities, so logprob values all thoughts the same: use "
                "Sample() or Continue(), with logprobs=true where a server is asked, or another evaluator, such as "
                "agreement",
                stacklevel=2,
            )
        return [1.0 if value is None else value for value in values]

    def of(self, state: State) -> float | None:
        """The value of a path; None where no log-probabilities of its tokens are known."""
        drawn = [part for thought in state.thoughts for part in thought.drawn.values()]
        logprobs = [logprob for part in drawn for logprob in part.logprobs]
        if not logprobs:
            return None
        width = min(self.window or len(logprobs), len(logprobs))
        sums = [0.0, *accumulate(logprobs)]
        return math.exp(min(end - begin for begin, end in zip(sums, sums[width:], strict=False)) / width)


class Agreement(Evaluator):
    """The share of other branches that say the same: the same answer, where a path has come to one, else what the
    task's `claims` finds in its last thought (0.5 where that is nothing, or there is no other branch)."""

    async def evaluate(self, ctx: Context, nodes: Sequence[Node]) -> list[float]:
        leaves = {node.id: node for node in (*ctx.tree.leaves(), *nodes)}
        said = {leaf.id: ctx.claims(leaf, whole=True) for leaf in leaves.values()}
        return [self._value(ctx, node, {i: claims for i, claims in said.items() if i != node.id}) for node in nodes]

    def _value(self, ctx: Context, node: Node, others: dict[int, frozenset[Hashable]]) -> float:
        claims = ctx.claims(node)
        if not claims or not others:
            return 0.5
        return sum(claim in other for other in others.values() for claim in claims) / (len(claims) * len(others))


class Random(Evaluator):
    """A number drawn uniformly from [0, 1): what any evaluator has to beat."""

    async def evaluate(self, ctx: Context, nodes: Sequence[Node]) -> list[float]:
        return [ctx.random("value", ctx.tree.place(node)).random() for node in nodes]


def _given(value: float | None, what: str, generators: str) -> float:
    if value is None:
        raise OptionError(f"the thought generator gives no {what}: use {generators}")
    return value
