"""Sample: independent samples of one prompt (ToT, section 3, "Thought generator", a); and whole solutions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from tot.generators.base import Count, Generator
from tot.llm.context import Context
from tot.llm.replies import Proposal, Reply, spent
from tot.tree.thought import Thought
from tot.tree.tree import Node


class Sample(Generator):
    """Independent samples of one prompt.

    A task whose thought has several templates (GSM8K: sub-question, then sub-answer) is asked them one after another,
    each level of all nodes' samples in one batch.
    """

    thoughts: Count = 3
    """Thoughts after each state, where the search does not say how many."""
    samples: Count = 1
    """Draw the last template's text so often; keep one whose answer is the most frequent, and note how frequent it was
    (RAP's confidence)."""

    async def propose(self, ctx: Context, nodes: Sequence[Node], count: int | None) -> list[list[Proposal]]:
        count = count or self.thoughts
        templates = ctx.task.thought
        return await ctx.each(
            nodes, lambda node: write(ctx, node, blank(count), templates, self.temperature, self.samples)
        )


def blank(count: int) -> list[Proposal]:
    """Thoughts of which nothing is written yet."""
    return [Proposal(Thought(parts={}), prior=1 / count) for _ in range(count)]


async def write(
    ctx: Context,
    node: Node,
    proposals: list[Proposal],
    templates: Sequence[str],
    temperature: float,
    samples: int = 1,
) -> list[Proposal]:
    """Ask `templates`, one after another, for the rest of every proposal's thought; of the last one keep the most
    frequent of so many `samples`.

    The first prompt after a node is the same for all proposals that hold nothing yet, which share it.
    """

    async def extend(call: int, group: Sequence[Proposal], template: str, repeats: int) -> None:
        begun = group[0].thought
        if begun is None:
            return
        n = len(group) * repeats
        replies = await ctx.ask(template, node, n, temperature=temperature, call=call, begun=begun)
        for i, proposal in enumerate(group):
            _extend(ctx, proposal, template, replies[i * repeats : (i + 1) * repeats])

    for template in templates:
        repeats = samples if template == templates[-1] else 1
        shared = bool(proposals) and all(one.thought is not None and not one.thought.parts for one in proposals)
        groups = [proposals] if shared else [[proposal] for proposal in proposals]
        await ctx.each(list(enumerate(groups)), lambda each: extend(*each, template, repeats))  # noqa: B023 - awaited
    return proposals


def _extend(ctx: Context, proposal: Proposal, template: str, replies: Sequence[Reply]) -> None:
    """Put the most frequent of `replies` into the thought; None where none can be read."""
    task = ctx.task
    whole = [reply for reply in replies if not reply.cut]
    parsed = [(text, reply) for reply in whole if (text := _parsed(ctx, template, reply.text)) is not None]
    proposal.usage += spent(replies)
    proposal.calls += tuple(call for reply in replies for call in reply.calls)
    proposal.parse_failures += len(whole) - len(parsed) + sum(reply.unread for reply in replies)
    proposal.decoder = ctx.decoder
    if not parsed or proposal.thought is None:
        proposal.thought = None
        return
    chosen = 0
    if len(replies) > 1:
        found = [ctx.answer_in(text, reply.truncated) for text, reply in parsed]
        answers = [None if answer is None else task.canonical(answer) for answer in found]
        # Texts without an answer agree on nothing: they count only where there is nothing else.
        (common, times), *_ = Counter([answer for answer in answers if answer is not None] or [None]).most_common(1)
        chosen = answers.index(common)
        proposal.confidence = times / len(replies)
    text, reply = parsed[chosen]
    before = proposal.thought
    drawn = {**before.drawn, **reply.drawn(template)}
    proposal.thought = Thought(parts={**before.parts, template: text}, drawn=drawn, truncated=reply.truncated)


def _parsed(ctx: Context, template: str, text: str) -> str | None:
    """What is kept of a text: of a whole solution all of it."""
    return ctx.task.parse_thought(template, text) if template in ctx.task.thought else text.strip() or None


async def chains(
    ctx: Context,
    nodes: Sequence[Node],
    count: int,
    generator: Generator,
    solutions: Sequence[str] = (),
    greedy_draft: bool = False,
) -> list[list[Proposal]]:
    """`count` whole solutions after each node, at the generator's temperature; a single one is decoded greedily unless
    a temperature was given, with `greedy_draft` always.

    The templates `solutions` take turns in asking for them; without any it is the task's `chain`. Of a task that has
    none, and no world in which a single thought is no solution, a thought each: the answer is then asked for after it,
    as after any other.
    """
    task = ctx.task
    temperature = generator.temperature if isinstance(generator, Generator) else 0.7
    if count == 1 and (greedy_draft or "temperature" not in getattr(generator, "model_fields_set", ())):
        temperature = 0.0
    if not solutions and not task.has_template(task.chain) and ctx.state(nodes[0]).world is None:
        return await ctx.each(nodes, lambda node: write(ctx, node, blank(count), task.thought, temperature))
    ways = solutions or (task.chain,)

    async def solve(node: Node) -> list[Proposal]:
        proposals = blank(count)
        turns = [(proposals[i :: len(ways)], (way,)) for i, way in enumerate(ways)]
        await ctx.each(turns, lambda turn: write(ctx, node, *turn, temperature))
        for one in proposals:
            one.thought = one.thought and one.thought.model_copy(update={"ended": True})
        return proposals

    return await ctx.each(nodes, solve)
