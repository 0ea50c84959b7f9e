"""Results of search steps: proposals, evaluations, and the replies that they are made from.

Expanding a node returns proposals, evaluating it an evaluation. A model, a table or a person may produce them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Annotated, Any

from pydantic import Field

from tot.decoders.errors import TaskError
from tot.decoders.request import Completion, Message, Request, ToolCall, Usage
from tot.task.checked import CheckedTask
from tot.tree.calls import Call
from tot.tree.thought import SampledText, Thought

NOTHING = Usage()
Calls = Annotated[tuple[Call, ...], Field(exclude=True)]
"""The calls to a model. A checkpoint saves them with the tree, not with the results of a step."""


@dataclass(slots=True)
class Proposal:
    """A proposed thought, which is None if its text was rejected or cut off."""

    thought: Thought | None
    usage: Usage = NOTHING
    parse_failures: int = 0
    refused: str | None = None
    """Why its text was rejected: the reason of a search without an answer."""
    prior: float | None = None
    """Probability of the thought among its siblings."""
    confidence: float | None = None
    """Share of samples that agreed with the thought."""
    decoder: str | None = None
    calls: Calls = ()


@dataclass(frozen=True, slots=True)
class Evaluation:
    """A state's value and its usage. The value is None if the budget cut the evaluation off."""

    value: float | None
    usage: Usage = NOTHING
    parse_failures: int = 0
    parts: tuple[Evaluation, ...] = ()
    """The evaluations that it combines."""
    calls: Calls = ()

    def again(self) -> Evaluation:
        """Return a copy for another node, without the usage, which counts only once."""
        return replace(self, usage=NOTHING, parse_failures=0, calls=())


@dataclass(frozen=True, slots=True)
class Reply:
    """One sample of a template for a node, or the scores of its labels.

    Passed to a search, it becomes a thought with its sampled tokens, call and usage.
    """

    template: str
    request: Request
    completion: Completion
    decoder: str | None = None
    unread: int = 0
    """1 if a rationale was cut before its answer and then decoded again as a whole."""
    turn: tuple[str, Sequence[ToolCall]] = ("", ())
    """The text before the calls of functions, and the calls."""

    @property
    def text(self) -> str:
        """The text; for parallel steps, their bodies as paragraphs."""
        bodies = [part.text.partition(":")[2].strip() for part in self.completion.parts if part.kind == "step"]
        return "\n\n".join(filter(None, bodies)) or self.completion.text

    @property
    def cut(self) -> bool:
        """Whether the budget or a cancellation ended the text early."""
        return is_cut(self.completion)

    @property
    def truncated(self) -> bool:
        """Whether the token limit ended the text, or a repetition without end."""
        return self.completion.finish_reason in ("length", "repetition")

    @property
    def usage(self) -> Usage:
        return self.completion.usage

    @property
    def calls(self) -> tuple[Call, ...]:
        request, completion = self.request, self.completion
        scored = zip(request.choices, completion.choice_logprobs, strict=False)  # empty if cut
        call = Call(
            purpose=request.purpose,
            template=self.template,
            prompt=tuple(message for message in request.prompt if isinstance(message, Message)),
            output=completion.text,
            parts=completion.parts,
            choices={choice: score.total for choice, score in scored},
        )
        return (call,)

    @property
    def logprobs(self) -> list[float]:
        """Log-probabilities (nats) of the scored labels, in order; empty if the scoring was cut."""
        return [choice.total for choice in self.completion.choice_logprobs]

    def sampled(self, name: str) -> dict[str, SampledText]:
        """Return the sampled tokens for the part `name` of a thought. A server may return only log-probabilities."""
        completion, own = self.completion, self.completion.text_tokens
        drawn = SampledText(text=completion.text, tokens=completion.tokens[own], logprobs=completion.logprobs[own])
        return {name: drawn} if drawn.tokens or drawn.logprobs else {}

    def evaluation(self, value: float | None, parse_failures: int = 0) -> Evaluation:
        """Return an evaluation of this reply with its usage. The value is None if the reply was cut."""
        return Evaluation(None if self.cut else value, self.usage, parse_failures, calls=self.calls)


def as_proposal(result: Any, task: CheckedTask) -> Proposal:
    """Convert a result to a proposal, with the objects of typed thoughts. Raises TaskError if it is not a thought."""
    proposal = _proposal(result, task)
    if proposal.thought is not None:
        proposal.thought = task.typed(proposal.thought)
        proposal.parse_failures += proposal.thought is None
    return proposal


def _proposal(result: Any, task: CheckedTask) -> Proposal:
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
            thought = Thought(parts={name: text}, drawn=result.sampled(name), truncated=result.truncated)
        unread = result.unread + (text is None and not result.cut)
        return Proposal(thought, result.usage, unread, decoder=result.decoder, calls=result.calls)
    raise TaskError(f"{result!r} is not a thought: give texts, Thoughts, Replies or Proposals")


def as_proposals(results: Any, task: CheckedTask) -> list[Proposal]:
    """Convert the results after one node to proposals. Raises TaskError if they are not a list of thoughts."""
    if isinstance(results, str | Thought | Proposal | Mapping) or not isinstance(results, Iterable):
        raise TaskError(f"{results!r} is not a list of thoughts: pass a list for each node, which may be empty")
    return [as_proposal(one, task) for one in results]


def as_evaluation(result: Any) -> Evaluation:
    """Convert a result to an evaluation. Raises TaskError if it is not a value."""
    if isinstance(result, Evaluation):
        return result
    if result is None:
        return Evaluation(None)
    if not isinstance(result, str | bytes):
        with suppress(TypeError, ValueError, OverflowError, RuntimeError):
            return Evaluation(float(result))
    raise TaskError(f"{result!r:.100} is not a value: give a number, None or an Evaluation for each node")


def is_cut(completion: Completion) -> bool:
    """Return whether the budget or a cancellation ended the text early."""
    return completion.finish_reason in ("budget", "cancelled")


def spent(replies: Sequence[Reply]) -> Usage:
    """Return the total usage of samples decoded in parallel. Their seconds are not added up."""
    usage = sum((reply.usage for reply in replies), NOTHING)
    return replace(usage, seconds=max((reply.usage.seconds for reply in replies), default=0.0))


def softmax(logprobs: Sequence[float], temperature: float = 1.0) -> list[float]:
    """Normalise to probabilities; uniform if all are impossible."""
    top = max(logprobs)
    if top == -math.inf:
        return [1 / len(logprobs)] * len(logprobs)
    weights = [math.exp((logprob - top) / temperature) for logprob in logprobs]
    return [weight / sum(weights) for weight in weights]
