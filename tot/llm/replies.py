"""What passes between a search and whoever does its work: steps to be done, and their results.

A search asks for nodes to be expanded or evaluated; proposals and evaluations come back. None of these know where
thoughts come from: a model, a table, a person.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Annotated, Any

from pydantic import Field

from tot.decoders.errors import TaskError
from tot.decoders.request import Completion, Request, Usage
from tot.llm.parallel_steps import said
from tot.task.task import Task
from tot.tree.calls import Call, calls_of
from tot.tree.thought import Drawn, Thought

NOTHING = Usage()
Asked = Annotated[tuple[Call, ...], Field(exclude=True)]
"""What was asked. It goes into the tree, and a checkpoint keeps it there: it is no result that a search goes by."""


@dataclass(slots=True)
class Proposal:
    """A thought on its way into the tree; None where its text was rejected or cut off."""

    thought: Thought | None
    usage: Usage = NOTHING
    parse_failures: int = 0
    prior: float | None = None
    """Its probability among its siblings."""
    confidence: float | None = None
    """The share of samples that agreed with it."""
    decoder: str | None = None
    calls: Asked = ()


@dataclass(frozen=True, slots=True)
class Evaluation:
    """A state's value, and what it took. None where a budget cut the evaluation off."""

    value: float | None
    usage: Usage = NOTHING
    parse_failures: int = 0
    parts: tuple[Evaluation, ...] = ()
    """What it was combined from."""
    calls: Asked = ()

    def again(self) -> Evaluation:
        """The same for another node: it was paid for once."""
        return replace(self, usage=NOTHING, parse_failures=0, calls=())


@dataclass(frozen=True, slots=True)
class Reply:
    """One sample of what a template was asked about a node, or the scores of its labels.

    Given to a search as it is, it becomes a thought that keeps the tokens drawn, the call and what it took.
    """

    template: str
    request: Request
    completion: Completion
    decoder: str | None = None
    unread: int = 0
    """1 where a rationale had been cut before its answer, and was decoded again as a whole."""

    @property
    def text(self) -> str:
        """What the model wrote; of parallel steps what they say, as paragraphs."""
        return said(self.completion)

    @property
    def cut(self) -> bool:
        """True where a budget or a cancellation ended the text before its time."""
        return is_cut(self.completion)

    @property
    def truncated(self) -> bool:
        """True where the token limit ended the text."""
        return self.completion.finish_reason == "length"

    @property
    def usage(self) -> Usage:
        return self.completion.usage

    @property
    def calls(self) -> tuple[Call, ...]:
        return calls_of(self.template, self.request, [self.completion])

    @property
    def logprobs(self) -> list[float]:
        """Log-probabilities (nats) of the labels that were scored, in their order; none where the scoring was cut."""
        return [choice.total for choice in self.completion.choice_logprobs]

    def drawn(self, name: str) -> dict[str, Drawn]:
        """The tokens drawn as those of the thought's part `name`; a server may give log-probabilities alone."""
        completion = self.completion
        return (
            {name: Drawn(text=completion.text, tokens=completion.tokens, logprobs=completion.logprobs)}
            if completion.tokens or completion.logprobs
            else {}
        )

    def evaluation(self, value: float | None, parse_failures: int = 0) -> Evaluation:
        """`value` as what this reply says, paid for by it; None where it was cut."""
        return Evaluation(None if self.cut else value, self.usage, parse_failures, calls=self.calls)


def as_proposal(result: Any, task: Task) -> Proposal:
    """What was proposed, as it goes into the tree. Raises TaskError for what is no thought."""
    if isinstance(result, Proposal):
        return result
    if isinstance(result, Thought):
        return Proposal(result)
    if isinstance(result, str):
        return Proposal(Thought(parts={task.thought[-1]: result}))
    if isinstance(result, Reply):
        text = None if result.cut else task.parse_thought(result.template, result.text)
        name = result.template if result.template in task.thought else task.thought[-1]
        thought = None
        if text is not None:
            thought = Thought(parts={name: text}, drawn=result.drawn(name), truncated=result.truncated)
        unread = result.unread + (text is None and not result.cut)
        return Proposal(thought, result.usage, unread, decoder=result.decoder, calls=result.calls)
    raise TaskError(f"{result!r} is not a thought: give texts, Thoughts, Replies or Proposals")


def as_evaluation(result: Any) -> Evaluation:
    """What a node was valued at. Raises TaskError for what is no value."""
    if isinstance(result, Evaluation):
        return result
    if result is None:
        return Evaluation(None)
    if not isinstance(result, str | bytes):
        with suppress(TypeError, ValueError, OverflowError, RuntimeError):
            return Evaluation(float(result))
    raise TaskError(f"{result!r:.100} is not a value: give a number, None or an Evaluation for each node")


def is_cut(completion: Completion) -> bool:
    """True where a budget or a cancellation ended the text before its time."""
    return completion.finish_reason in ("budget", "cancelled")


def spent(replies: Sequence[Reply]) -> Usage:
    """What samples drawn side by side took together: their seconds are not added up."""
    usage = sum((reply.usage for reply in replies), NOTHING)
    return replace(usage, seconds=max((reply.usage.seconds for reply in replies), default=0.0))


def softmax(logprobs: Sequence[float], temperature: float = 1.0) -> list[float]:
    """Probabilities among themselves; equal ones where all are impossible."""
    top = max(logprobs)
    if top == -math.inf:
        return [1 / len(logprobs)] * len(logprobs)
    weights = [math.exp((logprob - top) / temperature) for logprob in logprobs]
    return [weight / sum(weights) for weight in weights]
