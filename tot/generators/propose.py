"""Propose: one reply that lists several thoughts (ToT, section 3, "Thought generator", b)."""

from __future__ import annotations

from collections.abc import Sequence

from tot.generators.base import Count, Generator
from tot.generators.sample import write
from tot.llm.context import Context
from tot.llm.parallel_steps import bodies
from tot.llm.replies import Proposal, Reply
from tot.tree.thought import Thought
from tot.tree.tree import Node


class Propose(Generator):
    """One reply lists several thoughts, one a line; further templates of a thought are asked for each.

    `pdos` writes the thoughts of a reply side by side, as parallel steps.
    """

    thoughts: Count = 3
    """Thoughts asked for after each state, where the search does not say how many."""

    async def propose(self, ctx: Context, nodes: Sequence[Node], count: int | None) -> list[list[Proposal]]:
        task, wanted = ctx.task, count or self.thoughts
        titles = [f"Idea {number}" for number in range(1, wanted + 1)]

        async def list_thoughts(node: Node) -> list[Proposal]:
            (reply,) = await ctx.ask(task.propose, node, temperature=self.temperature, titles=titles, count=wanted)
            first, *others = task.thought
            parsed = [task.parse_thought(first, text) for text in _listed(ctx, reply)]
            texts = list(dict.fromkeys(text for text in parsed if text is not None))[:wanted]
            unread = sum(text is None for text in parsed) + (not parsed and not reply.cut)
            prior = 1 / max(len(texts), 1)
            end = (
                "\n" if task.generator.partition(":")[0].strip() == "continue" else ""
            )  # thoughts are pieces of one message, here its lines
            found = [Proposal(Thought(parts={first: text + end}), prior=prior, decoder=reply.decoder) for text in texts]
            call = Proposal(None, reply.usage, unread, calls=reply.calls)  # the call itself is the state's
            return [*await write(ctx, node, found, others, self.temperature), call]

        return await ctx.each(nodes, list_thoughts)


def _listed(ctx: Context, reply: Reply) -> list[str]:
    """The thoughts in a reply; of one written as a step the first line counts, as in a list."""
    if reply.cut:
        return []
    text = reply.completion.text
    steps = [body.splitlines()[0] for body in bodies(reply.completion) if body]
    listed = ctx.task.parse_proposals("\n".join(steps) or text)
    if reply.completion.finish_reason == "length" and len(listed) > 1 and not (steps or text.endswith("\n")):
        listed.pop()  # it ends in the middle
    return listed
