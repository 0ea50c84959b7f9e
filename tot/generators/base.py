"""Thought generators: what may come next after a state.

ToT, section 3, "Thought generator": independent samples (a) or one reply that lists several (b); and the legal actions
of a task with a world, ranked by the model, as in RAP.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Literal, Protocol

from pydantic import BaseModel, ConfigDict, Field

from tot.calls import Call, calls_of
from tot.decoders.request import Completion, Message, Request, Sampling, Usage
from tot.parallel import bodies, said, with_room
from tot.backend import is_cut
from tot.search.session import Problem, spent
from tot.steps import Proposal
from tot.state import Drawn, Thought
from tot.task import Task
from tot.tree import Node
from tot.written import as_written

Count = Annotated[int, Field(ge=1)]
Temperature = Annotated[float, Field(ge=0)]

ANSWER_TOKENS = 32
"""Room for what comes after a template's answer trigger, where a text may have so many."""


class ThoughtGenerator(Protocol):
    async def propose(self, problem: Problem, nodes: Sequence[Node], count: int | None) -> list[list[Proposal]]:
        """Drafts of what may come after each node: `count`, or as many as the generator gives of itself."""


class _Generator(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    temperature: Temperature = 0.7
    """SEED and ToT use 1.0 and 0.7; small models ramble at 1.0."""


class Sample(_Generator):
    """Independent samples of one prompt.

    A task whose thought has several templates (GSM8K: sub-question, then sub-answer) is asked them one after another,
    each level of all nodes' samples in one batch.
    """

    n: Count = 3
    """Samples after each state, where the search does not say how many."""
    votes: Count = 1
    """Draw the last template's text so often; keep one whose answer is the most frequent, and note how frequent it was
    (RAP's confidence)."""

    async def propose(self, problem: Problem, nodes: Sequence[Node], count: int | None) -> list[list[Proposal]]:
        count = count or self.n
        drafts = [[Proposal(Thought(parts={}), prior=1 / count) for _ in range(count)] for _ in nodes]
        await write(problem, nodes, drafts, problem.task.thought, self.temperature, self.votes)
        return drafts


class Propose(_Generator):
    """One reply lists several thoughts, one a line; further templates of a thought are asked for each.

    `pdos` writes the thoughts of a reply side by side, as parallel steps.
    """

    n: Count = 3
    """Thoughts asked for after each state, where the search does not say how many."""

    async def propose(self, problem: Problem, nodes: Sequence[Node], count: int | None) -> list[list[Proposal]]:
        task, count = problem.task, count or self.n
        parallel = problem.decoder_name("generate") == "pdos"
        requests = []
        for node in nodes:
            seed = problem.generation_seed(node, task.propose, 0)
            sampling = problem.sampling(task.propose, self.temperature, seed)
            prompt = task.prompt(task.propose, problem.tree.state(node), count=count)
            steps: tuple[str, ...] = ()
            if parallel:
                steps = tuple(f"Idea {number}" for number in range(1, count + 1))
                sampling = with_room(sampling, count)
            requests.append(Request(prompt=prompt, sampling=sampling, steps=steps))
        first, *others = task.thought
        drafts = []
        for request, (completion,) in zip(requests, await problem.complete(requests), strict=True):
            # Of an idea that was written as a step the first line counts, as in a list.
            lines = [body.splitlines()[0] for body in bodies(completion) if body]
            text = "\n".join(lines) if lines else completion.text
            listed = [] if is_cut(completion) else task.parse_proposals(text)
            ended = lines or completion.text.endswith("\n")
            if completion.finish_reason == "length" and len(listed) > 1 and not ended:
                listed.pop()  # it ends in the middle
            parsed = [task.parse_thought(first, text) for text in listed]
            texts = list(dict.fromkeys(text for text in parsed if text is not None))[:count]
            unread = sum(text is None for text in parsed) + (not parsed and not is_cut(completion))
            name = problem.decoder_name("generate")
            found = [Proposal(Thought(parts={first: text}), prior=1 / len(texts), decoder=name) for text in texts]
            calls = calls_of(task.propose, request, [completion])
            drafts.append(
                [*found, Proposal(None, completion.usage, unread, calls=calls)]
            )  # the call itself is the state's
        await write(problem, nodes, drafts, others, self.temperature)
        return drafts


class Enumerate(_Generator):
    """The task's legal actions, the likeliest first.

    All actions of all nodes are scored as continuations of the first thought template, in one packed forward; their
    probabilities among themselves are the priors. Nothing is decoded.
    """

    n: Count | None = None
    """The best n, where the search does not say how many; None takes all."""
    temperature: Annotated[float, Field(gt=0)] = 1.0
    """Of the priors: above 1 they are flatter than the model has them, for a model that is too sure of itself. Further
    templates of a thought are sampled at it."""
    prior: Literal["model", "uniform", "random"] = "model"
    """uniform and random ask no model: the task's own order, or an order and priors drawn by the seed."""

    async def propose(self, problem: Problem, nodes: Sequence[Node], count: int | None) -> list[list[Proposal]]:
        first, *others = problem.task.thought
        legal = [list(problem.actions(node)) for node in nodes]
        scored = await self._scores(problem, nodes, legal, first)
        drafts = []
        for actions, (priors, usage, calls) in zip(legal, scored, strict=True):
            order = sorted(range(len(actions)), key=lambda i: -priors[i])[: count or self.n]
            name = problem.decoder_name("generate") if usage is not None else None
            ranked = [Proposal(Thought(parts={first: actions[i]}), prior=priors[i], decoder=name) for i in order]
            drafts.append([*ranked, Proposal(None, usage or Usage(), calls=calls)])
        await write(problem, nodes, drafts, others, self.temperature)
        return drafts

    async def _scores(
        self, problem: Problem, nodes: Sequence[Node], legal: Sequence[Sequence[str]], template: str
    ) -> list[tuple[list[float], Usage | None, tuple[Call, ...]]]:
        """For each node its actions' probabilities, and what asking took; None where nothing was asked."""
        asked = [self.prior == "model" and len(actions) > 1 for actions in legal]
        requests = []
        for node, actions, ask in zip(nodes, legal, asked, strict=True):
            if ask:
                prompt = problem.task.prompt(template, problem.tree.state(node))
                space = " " if prompt[-1].role == "assistant" else ""
                choices = tuple(f"{space}{action}\n" for action in actions)
                requests.append(Request(prompt=prompt, choices=choices, sampling=Sampling()))
        done = zip(requests, await problem.complete(requests), strict=True)
        scored: list[tuple[list[float], Usage | None, tuple[Call, ...]]] = []
        for node, actions, ask in zip(nodes, legal, asked, strict=True):
            if ask:
                request, (completion,) = next(done)
                totals = [choice.total for choice in completion.choice_logprobs]
                priors = self._softmax(totals) if totals else [0.0] * len(actions)
                scored.append((priors, completion.usage, calls_of(template, request, [completion])))
            elif self.prior == "random":
                draw = problem.growth.random("prior", problem.tree.place(node))
                weights = [-math.log(1 - draw.random()) for _ in actions]  # normalised: uniform over the simplex
                scored.append(([weight / sum(weights) for weight in weights], None, ()))
            else:
                scored.append(([1 / len(actions) for _ in actions], None, ()))
        return scored

    def _softmax(self, logprobs: Sequence[float]) -> list[float]:
        top = max(logprobs)
        if top == -math.inf:
            return [1 / len(logprobs)] * len(logprobs)
        weights = [math.exp((logprob - top) / self.temperature) for logprob in logprobs]
        return [weight / sum(weights) for weight in weights]


async def write(
    problem: Problem,
    nodes: Sequence[Node],
    drafts: Sequence[Sequence[Proposal]],
    templates: Sequence[str],
    temperature: float,
    votes: int = 1,
) -> None:
    """Ask `templates`, one after another, for the rest of every draft's thought; each level of all drafts in one batch.

    The first prompt after a node is the same for all drafts that hold nothing yet, which share it.
    """
    task, tree, name = problem.task, problem.tree, problem.decoder_name("generate")
    for template in templates:
        repeats = votes if template == templates[-1] else 1
        asked: list[list[Proposal]] = []
        requests = []
        for node, siblings in zip(nodes, drafts, strict=True):
            blank = all(draft.thought is not None and not draft.thought.parts for draft in siblings)
            groups = [list(siblings)] if blank and siblings else [[draft] for draft in siblings]
            for call, group in enumerate(groups):
                if group[0].thought is None:
                    continue
                seed = problem.generation_seed(node, template, call)
                sampling = problem.sampling(template, temperature, seed, n=len(group) * repeats)
                state = tree.state(node)
                prompt = task.prompt(template, state, **group[0].thought.parts)
                prompt = as_written(prompt, [*state.thoughts, group[0].thought])
                steps = tuple(task.steps(template, tree.state(node)))
                requests.append(_request(task, template, prompt, sampling, steps))
                asked.append(group)
        results = await problem.complete(requests)
        missed = await _decode_whole(problem, requests, results)
        for request, group, completions, count in zip(requests, asked, results, missed, strict=True):
            group[0].parse_failures += count
            for i, draft in enumerate(group):
                samples = completions[i * repeats : (i + 1) * repeats]
                draft.calls += calls_of(template, request, samples)
                _continue(problem, draft, template, samples)
                draft.decoder = name


def _request(
    task: Task, template: str, prompt: tuple[Message, ...], sampling: Sampling, steps: tuple[str, ...]
) -> Request:
    """With the template's answer trigger, if it has one: then what comes before that is a rationale."""
    trigger = task.triggers.get(template)
    if trigger is None:
        return Request(prompt=prompt, sampling=sampling, steps=steps)
    sampling = sampling.model_copy(update={"stop": (*sampling.stop, trigger)})
    answer_tokens = min(ANSWER_TOKENS, sampling.max_tokens)
    return Request(prompt=prompt, sampling=sampling, steps=steps, answer_trigger=trigger, answer_tokens=answer_tokens)


async def _decode_whole(
    problem: Problem, requests: Sequence[Request], results: Sequence[list[Completion]]
) -> Sequence[int]:
    """Where rationales were cut and an answer can't be read, decode them whole instead. Returns, by request, how many
    could not be read."""
    missed = [
        sum(
            one.usage.undecoded_tokens > 0 and not is_cut(one) and problem.task.parse_answer(one.text) is None
            for one in completions
        )
        for completions in results
    ]
    again = [i for i, count in enumerate(missed) if count]
    whole = await problem.complete([requests[i].model_copy(update={"whole_rationale": True}) for i in again])
    for i, completions in zip(again, whole, strict=True):
        results[i][:] = [
            replace(new, usage=old.usage + new.usage) for old, new in zip(results[i], completions, strict=True)
        ]
    return missed


def _continue(problem: Problem, draft: Proposal, template: str, samples: Sequence[Completion]) -> None:
    """Put the most frequent of `samples` into the draft's thought; None where none can be read."""
    task = problem.task
    draft.usage += spent(samples)
    whole = [sample for sample in samples if not is_cut(sample)]
    read = [(text, sample) for sample in whole if (text := _parsed(task, template, said(sample))) is not None]
    texts = [text for text, _ in read]
    draft.parse_failures += len(whole) - len(texts)
    if not texts or draft.thought is None:
        draft.thought = None
        return
    chosen = 0
    if len(samples) > 1:
        answers = [None if (answer := task.parse_answer(text)) is None else task.canonical(answer) for text in texts]
        # Texts without an answer agree on nothing: they count only where there is nothing else.
        (common, times), *_ = Counter([answer for answer in answers if answer is not None] or [None]).most_common(1)
        chosen = answers.index(common)
        draft.confidence = times / len(samples)
    text, sample = read[chosen]
    drawn = {template: Drawn(text=sample.text, tokens=sample.tokens)} if sample.tokens else {}
    draft.thought = Thought(parts={**draft.thought.parts, template: text}, drawn={**draft.thought.drawn, **drawn})


def _parsed(task: Task, template: str, text: str) -> str | None:
    """What is kept of a text: of a whole solution all of it."""
    return text.strip() or None if template == task.chain else task.parse_thought(template, text)


async def chains(problem: Problem, nodes: Sequence[Node], count: int, temperature: float) -> list[list[Proposal]]:
    """`count` whole solutions after each node; a single one is decoded greedily.

    Of a task that has no template for them, and no world in which a single thought is no solution, a thought each: the
    answer is then asked for after it, as after any other.
    """
    task = problem.task
    by_thought = not task.has_template(task.chain) and type(task).step is Task.step
    templates = task.thought if by_thought else (task.chain,)
    drafts = [[Proposal(Thought(parts={}), prior=1 / count) for _ in range(count)] for _ in nodes]
    await write(problem, nodes, drafts, templates, temperature if count > 1 else 0.0)
    return drafts
