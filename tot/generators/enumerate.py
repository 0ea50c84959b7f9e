"""Enumerate: the legal actions of a task, ranked by the model, as in RAP."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated, Literal

from pydantic import Field

from tot.generators.base import Count, Generator
from tot.generators.sample import write
from tot.llm.context import Context
from tot.llm.replies import Proposal, softmax
from tot.task.checked import CheckedTask
from tot.task.task import Task
from tot.task.world import HasActions
from tot.tree.thought import State, Thought
from tot.tree.tree import Node


class Enumerate(Generator):
    """Propose the task's legal actions, the most likely first.

    All actions of all nodes are scored as continuations of the first thought template in one batch; nothing is decoded.
    Their normalised probabilities are the priors.
    """

    has_confidence = False
    thoughts: Count | None = None
    """Number of actions per state, unless the search sets it; None returns all."""
    temperature: Annotated[float, Field(gt=0)] = 1.0
    """Temperature of the priors; above 1 it flattens them, for an overconfident model. Further templates of a thought
    are sampled at this temperature."""
    prior: Literal["model", "uniform", "random"] = "model"
    """uniform and random use no model: equal priors in the task's order, or random priors from the seed."""

    def check(self, task: Task) -> None:
        first, *others = task.thought
        if not isinstance(task, HasActions):
            CheckedTask(task).actions(State(question=""))  # raises
        task.prompts.require(*([first] if self.prior == "model" else []), *others)

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
                rng = ctx.random("prior", ctx.tree.place(node))
                weights = [-math.log(1 - rng.random()) for _ in actions]  # normalised: uniform over the simplex
                priors = [weight / sum(weights) for weight in weights]
            order = sorted(range(len(actions)), key=lambda i: -priors[i])[: count or self.thoughts]
            ranked = [Proposal(Thought(parts={first: actions[i]}), prior=priors[i], decoder=name) for i in order]
            return [*await write(ctx, node, ranked, others, self.temperature), call]

        return await ctx.each(nodes, rank)
