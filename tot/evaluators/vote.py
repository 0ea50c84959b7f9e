"""Vote: show the model all candidates and ask which is best (ToT, section 3, "State evaluator", b)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

from pydantic import Field

from tot.evaluators.base import Evaluator
from tot.llm.context import Context
from tot.llm.replies import Evaluation, Reply, spent
from tot.tree.tree import Node


class Vote(Evaluator):
    """Ask the model which candidate is best; a state's value is its share of the votes.

    The candidates are numbered from 1, in a random order for every vote to avoid position bias. A vote that can't be
    parsed counts for no candidate.
    """

    samples: Annotated[int, Field(ge=1)] = 5
    temperature: Annotated[float, Field(ge=0)] = 0.7

    @property
    def compares(self) -> bool:
        return True

    async def evaluate(self, ctx: Context, nodes: Sequence[Node]) -> list[Evaluation]:
        task = ctx.task
        if len(nodes) == 1:
            return [Evaluation(1.0)]
        texts = [task.candidate(ctx.state(node)) for node in nodes]
        places = [ctx.tree.place(node) for node in nodes]

        async def vote(number: int) -> tuple[int | None, Reply]:
            order = list(range(len(nodes)))
            ctx.random("vote", places, number).shuffle(order)
            candidates, root = [texts[i] for i in order], ctx.tree.root
            (reply,) = await ctx.ask(
                "vote",
                root,
                temperature=self.temperature,
                max_tokens=64,
                call=number,
                candidates=candidates,
            )
            choice = None if reply.cut else task.parse_vote(reply.completion.text, len(nodes))
            return None if choice is None else order[choice - 1], reply

        votes = await ctx.each(range(self.samples), vote)
        chosen, replies = [choice for choice, _ in votes], [reply for _, reply in votes]
        cut = any(reply.cut for reply in replies)
        unread = sum(choice is None and not reply.cut for choice, reply in votes)
        shares = [None if cut else chosen.count(i) / self.samples for i in range(len(nodes))]
        calls = tuple(call for reply in replies for call in reply.calls)
        return [Evaluation(shares[0], spent(replies), unread, calls=calls), *map(Evaluation, shares[1:])]
