"""Sample: independent samples of one prompt (ToT, section 3, "Thought generator", a); and whole solutions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from tot.generators.base import Count, Generator
from tot.llm.context import Context
from tot.llm.replies import Proposal, Reply, spent
from tot.task.checked import CheckedTask
from tot.task.task import Task
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

    @property
    def has_no_confidence(self) -> bool:
        return self.samples == 1

    def check(self, task: Task) -> None:
        task.prompts.require(*task.thought)

    async def propose(self, ctx: Context, nodes: Sequence[Node], count: int | None) -> list[list[Proposal]]:
        count = count or self.thoughts
        templates = ctx.task.thought
        return await ctx.each(
            nodes, lambda node: write(ctx, node, blank(count), templates, self.temperature, self.samples)
        )

    async def sample(self, ctx: Context, node: Node, number: int, count: int) -> list[Proposal]:
        """Sample only the thought with this number of `count` thoughts after a node."""
        return await write(ctx, node, blank(count)[:1], ctx.task.thought, self.temperature, self.samples, number)


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
) -> list[Proposal]:
    """Complete every proposal's thought with `templates`, one after another.

    The last template is sampled `samples` times, and the most frequent answer is chosen. Empty proposals of a node have
    the same first prompt and share one request, unless the task has `hints`. `first_call` is the number of the first
    request with a template.
    """

    async def extend(call: int, group: Sequence[Proposal], template: str, repeats: int) -> None:
        begun = group[0].thought
        if begun is None:
            return
        n = len(group) * repeats
        about = ctx.random("hint", ctx.tree.place(node), ctx.turn, call).choice(hints) if hints else ""
        replies = await ctx.ask(template, node, n, temperature=temperature, call=call, begun=begun, about=about)
        for i, proposal in enumerate(group):
            _extend(ctx, proposal, template, replies[i * repeats : (i + 1) * repeats])

    hints = ctx.task.hints(ctx.state(node))
    for template in templates:
        repeats = samples if template == templates[-1] else 1
        shared = (
            bool(proposals)
            and not hints
            and all(one.thought is not None and not one.thought.parts for one in proposals)
        )
        groups = [proposals] if shared else [[proposal] for proposal in proposals]
        await ctx.each(list(enumerate(groups, first_call)), lambda item: extend(*item, template, repeats))  # noqa: B023 - awaited
    return proposals


def _extend(ctx: Context, proposal: Proposal, template: str, replies: Sequence[Reply]) -> None:
    """Add the most frequent of `replies` to the thought; set it to None if no reply can be parsed."""
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
        parsed_answers = [ctx.answer_in(text, reply.truncated) for text, reply in parsed]
        answers = [None if answer is None else task.canonical(answer) for answer in parsed_answers]
        # Texts without an answer count only if no text has an answer.
        (common, times), *_ = Counter([answer for answer in answers if answer is not None] or [None]).most_common(1)
        chosen = answers.index(common)
        proposal.confidence = times / len(replies)
    text, reply = parsed[chosen]
    before = proposal.thought
    drawn = {**before.drawn, **reply.sampled(template)}
    proposal.thought = Thought(parts={**before.parts, template: text}, drawn=drawn, truncated=reply.truncated)


def _parsed(ctx: Context, template: str, text: str) -> str | None:
    """Parse a text as a thought; a whole solution is kept unchanged."""
    return ctx.task.parse_thought(template, text) if template in ctx.task.thought else text.strip() or None


async def whole_solutions(
    ctx: Context,
    node: Node,
    count: int,
    generator: Generator,
    solutions: Sequence[str] = (),
    greedy_draft: bool = False,
    sample: int | None = None,
) -> list[Proposal]:
    """Sample `count` whole solutions after a node, with one request per template.

    Samples use the generator's temperature. A single solution is decoded greedily if no temperature was given, or if
    `greedy_draft` is set. The templates `solutions` are used in turn; the default is the task's `chain`. With `sample`,
    only the solution with this number is sampled, not greedily.
    """
    temperature, templates = _temperature(generator), _templates(ctx.task, ctx.state(node), solutions)
    given = "temperature" in getattr(generator, "model_fields_set", ())
    if sample is None and count == 1 and (greedy_draft or not given):
        temperature = 0.0
    proposals = blank(count) if sample is None else blank(count)[:1]
    by_template: dict[tuple[str, ...], list[Proposal]] = {}  # a template that has several turns has one request
    for number, proposal in enumerate(proposals, sample or 0):
        by_template.setdefault(templates[number % len(templates)], []).append(proposal)
    await ctx.each(
        list(by_template.items()), lambda one: _write_whole(ctx, node, one[1], one[0], temperature, sample or 0)
    )
    return proposals


def distinct_solutions(
    task: CheckedTask, root: State, generator: Generator, solutions: Sequence[str] = ()
) -> int | None:
    """Return how many different whole solutions greedy decoding gives at the root; None if they are sampled."""
    templates = _templates(task, root, solutions)
    given = [task.sampling.get(one[-1], {}).get("temperature", _temperature(generator)) for one in templates]
    return None if any(one > 0 for one in given) or task.hints(root) else len(set(templates))


def _temperature(generator: Generator) -> float:
    return generator.temperature if isinstance(generator, Generator) else 0.7


def _templates(task: Task, state: State, solutions: Sequence[str]) -> list[tuple[str, ...]]:
    """Return the templates of each kind of solution.

    If the task has neither a `chain` template nor a world, a solution is one thought, after which the model is asked
    for the answer.
    """
    if not solutions and "chain" not in task.prompts and state.world is None:
        return [tuple(task.thought)]
    return [(template,) for template in solutions or ("chain",)]


async def _write_whole(
    ctx: Context,
    node: Node,
    proposals: list[Proposal],
    templates: tuple[str, ...],
    temperature: float,
    first_call: int = 0,
) -> None:
    await write(ctx, node, proposals, templates, temperature, first_call=first_call)
    for proposal in proposals:
        if proposal.thought is not None and templates != tuple(ctx.task.thought):
            proposal.thought = proposal.thought.model_copy(update={"ended": True})
