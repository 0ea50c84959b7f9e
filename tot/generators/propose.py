"""Propose: one reply that lists several thoughts (ToT, section 3, "Thought generator", b)."""

from __future__ import annotations

from collections.abc import Sequence

from tot.generators.base import Count, Generator
from tot.generators.sample import write
from tot.llm.context import Context
from tot.llm.replies import Proposal
from tot.task.task import Task
from tot.tree.thought import Thought
from tot.tree.tree import Node


class Propose(Generator):
    """Parse several thoughts from one reply, one per line. Further templates are completed for each thought."""

    has_confidence = False
    thoughts: Count = 3
    """Number of thoughts per state, unless the search sets it."""

    def check(self, task: Task) -> None:
        task.prompts.require("propose", *task.thought)

    async def propose(self, ctx: Context, nodes: Sequence[Node], count: int | None) -> list[list[Proposal]]:
        task, limit = ctx.task, count or self.thoughts

        async def list_thoughts(node: Node) -> list[Proposal]:
            (reply,) = await ctx.ask("propose", node, temperature=self.temperature, count=limit)
            first, *others = task.thought
            text = reply.completion.text
            listed = [] if reply.cut else task.parse_proposals(text)
            if reply.completion.finish_reason == "length" and len(listed) > 1 and not text.endswith("\n"):
                listed.pop()  # the token limit cut the last one
            parsed = [task.parse_thought(first, one) for one in listed]
            texts = list(dict.fromkeys(one for one in parsed if one is not None))[:limit]
            unread = parsed.count(None) + (not parsed and not reply.cut)
            prior = 1 / max(len(texts), 1)
            # With `continue`, thoughts are pieces of one message: here its lines.
            end = "\n" if task.generator.partition(":")[0].strip() == "continue" else ""
            thoughts = [Thought(parts={first: one + end}) for one in texts]
            proposals = [Proposal(thought, prior=prior, decoder=reply.decoder) for thought in thoughts]
            call = Proposal(None, reply.usage, unread, calls=reply.calls)  # the call counts for the state
            return [*await write(ctx, node, proposals, others, self.temperature), call]

        return await ctx.each(nodes, list_thoughts)
