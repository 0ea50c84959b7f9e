"""What OpenAI-compatible servers reply, as far as it is read here, and the samples in it: the text apart from the
thinking, why it ended, its log-probability, its tokens.

A reply that does not have this shape is broken, as one is that is no JSON. A thinking model's thoughts come in a field
of their own (`reasoning_content`, `reasoning`) or as a `<think>` block.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any

from pydantic import AliasPath, BaseModel, ConfigDict, Field, field_validator

from tot.decoders.errors import RequestError
from tot.decoders.request import ChoiceLogprob, FinishReason, Part, Sampling, Usage

_OPEN, _CLOSE = "<think>", "</think>"


class _Reply(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")


class Tokens(_Reply):
    """A reply's `usage`: its tokens."""

    prompt_tokens: Annotated[int, Field(ge=0)] = 0
    completion_tokens: Annotated[int, Field(ge=0)] | None = None
    cached_tokens: Annotated[
        int | None, Field(validation_alias=AliasPath("prompt_tokens_details", "cached_tokens"))
    ] = None


class Place(_Reply):
    """A token drawn."""

    logprob: float


class Logprobs(_Reply):
    """`content` is chat's; the lists, one entry a token, are completions' own."""

    content: tuple[Place, ...] | None = None
    token_logprobs: tuple[float | None, ...] | None = None
    top_logprobs: tuple[dict[str, float] | None, ...] | None = None

    @property
    def drawn(self) -> tuple[float | None, ...]:
        """The log-probability of each token."""
        if self.content is not None:
            return tuple(place.logprob for place in self.content)
        return self.token_logprobs or ()


class ReplyMessage(_Reply):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None


class Choice(_Reply):
    """One sample."""

    index: int = 0
    text: str | None = None
    message: ReplyMessage | None = None
    finish_reason: str | None = None
    stop_reason: Any = None
    """vLLM's and SGLang's: the stop string that ended the text; None for its own end, where it is said at all."""
    logprobs: Logprobs | None = None
    choice_logprobs: tuple[ChoiceLogprob, ...] = ()
    """`tot serve`'s: of the choices it was to score."""

    @field_validator("finish_reason")
    @classmethod
    def _finished(cls, given: str | None) -> str | None:
        if given in ("abort", "error"):  # what a server says that is shut down in mid-reply
            raise ValueError(f"the text was broken off ({given})")
        return given


class Reply(_Reply):
    """Of chat and completions alike."""

    choices: Annotated[tuple[Choice, ...], Field(min_length=1)]
    usage: Tokens | None = None


class TokenIds(_Reply):
    """Of vLLM's and SGLang's /tokenize."""

    tokens: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Sample:
    """One text that a server wrote, and its share of what the reply took."""

    text: str
    thinking: str
    finish_reason: FinishReason
    logprob: float
    usage: Usage

    @property
    def parts(self) -> tuple[Part, ...]:
        """The thinking, if there is any, and the text."""
        thinking = (Part("thinking", self.thinking),) if self.thinking else ()
        return (*thinking, Part("exact", self.text, self.usage.new_tokens))


CUT = Sample("", "", "budget", 0.0, Usage())
"""Where a budget was spent before a request was sent, or answered."""


def samples_of(reply: Reply, sampling: Sampling, logprobs: bool, used: Usage) -> list[Sample]:
    """A sample for each choice, in order. The first carries what was used for the prompt and what all of it costs; new
    tokens that a server counts for all samples together are split evenly.

    Raises RequestError where log-probabilities were asked for and are not there.
    """
    choices = sorted(reply.choices, key=lambda choice: choice.index)
    new = _shares(choices, used.new_tokens)
    done = []
    for i, choice in enumerate(choices):
        written, thinking = apart(choice)
        text = _until(written, sampling.stop)
        usage = replace(used, new_tokens=new[i]) if i == 0 else Usage(new_tokens=new[i], seconds=used.seconds)
        reason: FinishReason = "stop" if text != written else _reason(choice, sampling)
        done.append(Sample(text, thinking, reason, _logprob(choice) if logprobs else math.nan, usage))
    return done


def without(beginning: str, sample: Sample) -> Sample:
    """The sample without a beginning that the server was to go on with, and said again."""
    text = sample.text.lstrip()
    if not text.startswith(beginning.strip()):
        return sample
    return replace(sample, text=text.removeprefix(beginning.strip()))


def _shares(choices: Sequence[Choice], total: int) -> list[int]:
    counted = [len(choice.logprobs.drawn) if choice.logprobs is not None else 0 for choice in choices]
    if sum(counted) == total and all(counted):
        return counted
    share, rest = divmod(total, len(choices))
    return [share + (i < rest) for i in range(len(choices))]


def apart(choice: Choice) -> tuple[str, str]:
    """(text, thinking) of what was written. A block that was opened and never closed is thinking that was cut: there
    is no text."""
    if choice.message is None:
        text, thinking = choice.text or "", ""
    else:
        text = choice.message.content or ""
        thinking = choice.message.reasoning_content or choice.message.reasoning or ""
    opened = text.lstrip()
    if opened.startswith(_OPEN):
        block, closed, text = opened.removeprefix(_OPEN).partition(_CLOSE)
        return (text.lstrip() if closed else ""), thinking + block
    if _CLOSE in text:  # the template opened it, in the prompt
        block, _, text = text.partition(_CLOSE)
        return text.lstrip(), thinking + block
    return text, thinking


def _until(text: str, stops: Sequence[str]) -> str:
    """The text before the first stop string: some servers leave it in."""
    return text[: min((at for stop in stops if (at := text.find(stop)) >= 0), default=len(text))]


def _reason(choice: Choice, sampling: Sampling) -> FinishReason:
    if choice.finish_reason == "length":
        return "length"
    tells_stops = "stop_reason" in choice.model_fields_set  # apart from the model's own end
    return "stop" if isinstance(choice.stop_reason, str) or (sampling.stop and not tells_stops) else "eos"


def _logprob(choice: Choice) -> float:
    drawn = choice.logprobs.drawn if choice.logprobs is not None else ()
    if not drawn or None in drawn:
        raise RequestError("the server gives no log-probabilities: leave logprobs out, or ask one that does")
    return math.fsum(one for one in drawn if one is not None)
