"""Sample: independent samples of one prompt (ToT, section 3, "Thought generator", a); and whole solutions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from tot.generators.base import Count, Generator
from tot.generators.turns import Turns
from tot.llm.context import Context
from tot.llm.replies import Proposal, Reply, spent
from tot.task.checked import CheckedTask
from tot.task.task import Task
from tot.task.world import HasActions
from tot.tree.thought import State, Thought
from tot.tree.tree import Node


class Sample(Generator):
    """Propose independent samples of one prompt.

    If a thought has several templates (GSM8K: sub-question, then sub-answer), they are completed one after another,
    each in one batch for all nodes.
    """

    thoughts: Count = 3
    """Number of thoughts per state, unless the search sets it."""
    samples: Count = 1
    """Number of samples of the last template. The thought is one with the most frequent answer, whose share is the
    confidence (RAP)."""
    legal: bool = False
    """Sample only the task's legal `actions` as texts of the first template."""

    def check(self, task: Task) -> None:
        if self.legal and not isinstance(task, HasActions):
            CheckedTask(task).actions(State(question=""))  # raises
        task.prompts.require(*task.thought)

    async def propose(self, ctx: Context, nodes: Sequence[Node], count: int | None) -> list[list[Proposal]]:
        return await ctx.each(nodes, lambda node: self._write(ctx, node, blank(count or self.thoughts)))

    async def sample(self, ctx: Context, node: Node, number: int, count: int) -> list[Proposal]:
        """Sample only the thought with this number of `count` thoughts after a node."""
        return await self._write(ctx, node, blank(count)[:1], number)

    async def _write(self, ctx: Context, node: Node, proposals: list[Proposal], first_call: int = 0) -> list[Proposal]:
        legal = ctx.actions(node) if self.legal else []
        if self.legal and not legal:  # a dead end
            return []
        about = self.temperature, self.samples, first_call, legal
        return await write(ctx, node, proposals, ctx.task.thought, *about)


def blank(count: int) -> list[Proposal]:
    """Return `count` empty thoughts, to be written."""
    return [Proposal(Thought(parts={}), prior=1 / count) for _ in range(count)]


async def write(
    ctx: Context,
    node: Node,
    proposals: list[Proposal],
    templates: Sequence[str],
    temperature: float,
    samples: int = 1,
    first_call: int = 0,
    legal: Sequence[str] = (),
) -> list[Proposal]:
    """Complete every proposal's thought with `templates`, one after another.

    The last template is sampled `samples` times, and the most frequent answer is chosen. Empty proposals of a node have
    the same first prompt and share one request, unless the task has `hints`. `first_call` is the number of the first
    request with a template. `legal`: the only texts to sample for the first one.
    """

    async def extend(call: int, group: Sequence[Proposal], template: str, repeats: int) -> None:
        if (begun := group[0].thought) is None:
            return
        n = len(group) * repeats
        about = ctx.random("hint", ctx.tree.place(node), ctx.turn, call).choice(hints) if hints else ""
        options: dict[str, Any] = {"temperature": temperature, "call": call, "begun": begun, "about": about}
        only = legal if template == templates[0] else ()
        replies = await ctx.ask(template, node, n, legal=only, **options)
        for i, proposal in enumerate(group):
            _extend(ctx, proposal, template, replies[i * repeats : (i + 1) * repeats])

    hints = ctx.task.hints(ctx.state(node))
    for template in templates:
        repeats = samples if template == templates[-1] else 1
        empty = all(one.thought is not None and not one.thought.parts for one in proposals)
        groups = [proposals] if proposals and empty and not hints else [[one] for one in proposals]
        await ctx.each(list(enumerate(groups, first_call)), lambda item: extend(*item, template, repeats))  # noqa: B023 - awaited
    return proposals


def _extend(ctx: Context, proposal: Proposal, template: str, replies: Sequence[Reply]) -> None:
    """Add the most frequent of `replies` to the thought; set it to None if no reply can be parsed."""
    task, before = ctx.task, proposal.thought
    parsed: list[tuple[str, Reply]] = []
    for reply in replies:
        proposal.parse_failures += reply.unread
        if not reply.cut:
            parses = template in task.thought or task.schema(template)  # other whole solutions are kept unchanged
            text = task.parse_thought(template, reply.text) if parses else reply.text.strip() or None
            proposal.parse_failures += text is None
            parsed += [] if text is None else [(text, reply)]
    proposal.usage += spent(replies)
    proposal.calls += tuple(call for reply in replies for call in reply.calls)
    proposal.decoder = ctx.decoder
    if not parsed or before is None:
        proposal.thought = None
        return
    chosen = 0
    if len(replies) > 1:
        parsed_answers = [ctx.answer_in(text, reply.truncated, template) for text, reply in parsed]
        answers = [None if answer is None else task.canonical(answer) for answer in parsed_answers]
        # Texts without an answer count only if no text has an answer.
        (common, times), *_ = Counter([answer for answer in answers if answer is not None] or [None]).most_common(1)
        chosen = answers.index(common)
        proposal.confidence = times / len(replies)
    text, reply = parsed[chosen]
    drawn = {**before.drawn, **reply.sampled(template)}
    proposal.thought = Thought(parts={**before.parts, template: text}, drawn=drawn, truncated=reply.truncated)


async def whole_solutions(
    ctx: Context,
    node: Node,
    count: int,
    generator: Any,
    solutions: Sequence[str] = (),
    greedy_draft: bool = False,
    sample: int | None = None,
) -> list[Proposal]:
    """Sample `count` whole solutions after a node, with one request per template.

    Samples use the generator's temperature. A single solution is decoded greedily if no temperature was given, or if
    `greedy_draft` is set. The templates `solutions` are used in turn; the default is the task's `chain`. With `sample`,
    only the solution with this number is sampled.
    """
    given = "temperature" in getattr(generator, "model_fields_set", ())
    greedy = count == 1 and (greedy_draft or not given)
    temperature, first = 0.0 if greedy else _temperature(generator), sample or 0
    kinds = _kinds(ctx.task, ctx.state(node), solutions)
    proposals = blank(count) if sample is None else blank(count)[:1]
    by_kind: dict[tuple[str, ...], list[int]] = {}  # a kind that has several turns has one request
    for i in range(len(proposals)):
        by_kind.setdefault(kinds[(first + i) % len(kinds)], []).append(i)

    async def write_kind(templates: tuple[str, ...]) -> None:
        some = [proposals[i] for i in by_kind[templates]]
        if isinstance(generator, Turns):
            some = await generator.sample(ctx, node, templates[-1], len(some), temperature, first)
        else:
            await write(ctx, node, some, templates, temperature, first_call=first)
        for i, proposal in zip(by_kind[templates], some, strict=True):
            proposals[i] = proposal
            if proposal.thought is not None and templates != tuple(ctx.task.thought):
                proposal.thought = proposal.thought.model_copy(update={"ended": True})

    await ctx.each(list(by_kind), write_kind)
    return proposals


def distinct_solutions(task: CheckedTask, root: State, generator: Any, solutions: Sequence[str] = ()) -> int | None:
    """Return how many different whole solutions greedy decoding gives at the root; None if they are sampled."""
    kinds = _kinds(task, root, solutions)
    given = [task.sampling.get(one[-1], {}).get("temperature", _temperature(generator)) for one in kinds]
    return None if any(one > 0 for one in given) or task.hints(root) else len(set(kinds))


def _temperature(generator: Any) -> float:
    return generator.temperature if isinstance(generator, Generator) else 0.7


def _kinds(task: Task, state: State, solutions: Sequence[str]) -> list[tuple[str, ...]]:
    """Return the templates of each kind of solution.

    If the task has neither a `chain` template nor a world, a solution is one thought, after which the model is asked
    for the answer.
    """
    if not solutions and "chain" not in task.prompts and state.world is None:
        return [tuple(task.thought)]
    return [(template,) for template in solutions or ("chain",)]
