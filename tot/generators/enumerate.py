"""Enumerate: the legal actions of a task with a world, ranked by the model, as in RAP."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated, Literal

from pydantic import Field

from tot.generators.base import Count, Generator
from tot.generators.sample import write
from tot.llm.context import Context
from tot.llm.replies import Proposal, softmax
from tot.tree.thought import Thought
from tot.tree.tree import Node


class Enumerate(Generator):
    """The task's legal actions, the likeliest first.

    All actions of all nodes are scored as continuations of the first thought template, in one packed forward; their
    probabilities among themselves are the priors. Nothing is decoded.
    """

    thoughts: Count | None = None
    """The best so many, where the search does not say how many; None takes all."""
    temperature: Annotated[float, Field(gt=0)] = 1.0
    """Of the priors: above 1 they are flatter than the model has them, for a model that is too sure of itself. Further
    templates of a thought are sampled at it."""
    prior: Literal["model", "uniform", "random"] = "model"
    """uniform and random ask no model: the task's own order, or an order and priors drawn by the seed."""

    async def propose(self, ctx: Context, nodes: Sequence[Node], count: int | None) -> list[list[Proposal]]:
        first, *others = ctx.task.thought

        async def rank(node: Node) -> list[Proposal]:
            actions = ctx.actions(node)
            priors, call = [1 / len(actions)] * len(actions) if actions else [], Proposal(None)
            name = None
            if self.prior == "model" and len(actions) > 1:
                reply = await ctx.score(first, node, actions, end="\n", close=False)
                priors = softmax(reply.logprobs, self.temperature) if reply.logprobs else [0.0] * len(actions)
                name, call = reply.decoder, Proposal(None, reply.usage, calls=reply.calls)
            elif self.prior == "random":
                draw = ctx.random("prior", ctx.tree.place(node))
                weights = [-math.log(1 - draw.random()) for _ in actions]  # normalised: uniform over the simplex
                priors = [weight / sum(weights) for weight in weights]
            order = sorted(range(len(actions)), key=lambda i: -priors[i])[: count or self.thoughts]
            ranked = [Proposal(Thought(parts={first: actions[i]}), prior=priors[i], decoder=name) for i in order]
            return [*await write(ctx, node, ranked, others, self.temperature), call]

        return await ctx.each(nodes, rank)
