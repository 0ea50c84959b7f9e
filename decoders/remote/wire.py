"""What OpenAI-compatible servers reply, as far as it is read here; whatever else a reply holds is passed over.

A reply that does not have this shape is broken, as one is that is no JSON.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, field_validator


class _Reply(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")


class PromptDetails(_Reply):
    cached_tokens: Annotated[int, Field(ge=0)] | None = None


class Tokens(_Reply):
    """A reply's `usage`: its tokens."""

    prompt_tokens: Annotated[int, Field(ge=0)] = 0
    completion_tokens: Annotated[int, Field(ge=0)] | None = None
    prompt_tokens_details: PromptDetails | None = None

    @property
    def cached_tokens(self) -> int:
        details = self.prompt_tokens_details
        return min(self.prompt_tokens, (details and details.cached_tokens) or 0)


class Likely(_Reply):
    """A token that may have stood in a place."""

    token: str
    logprob: float


class Place(Likely):
    """A token drawn, and what else was likely there."""

    top_logprobs: tuple[Likely, ...] | None = None


class Logprobs(_Reply):
    """`content` is chat's; the lists, one entry a token, are completions' own."""

    content: tuple[Place, ...] | None = None
    tokens: tuple[str, ...] | None = None
    token_logprobs: tuple[float | None, ...] | None = None
    top_logprobs: tuple[dict[str, float] | None, ...] | None = None
    text_offset: tuple[int, ...] | None = None

    @property
    def drawn(self) -> tuple[float | None, ...]:
        """The log-probability of each token."""
        if self.content is not None:
            return tuple(place.logprob for place in self.content)
        return self.token_logprobs or ()

    @property
    def first(self) -> dict[str, float]:
        """The tokens likely in the first place, with their log-probabilities."""
        if self.content:
            place = self.content[0]
            return {likely.token: likely.logprob for likely in (place, *(place.top_logprobs or ()))}
        return (self.top_logprobs[0] if self.top_logprobs else None) or {}


class ReplyMessage(_Reply):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None


class ScoredChoice(_Reply):
    total: float
    tokens: Annotated[int, Field(ge=1)]


class Choice(_Reply):
    """One sample."""

    index: int = 0
    text: str | None = None
    message: ReplyMessage | None = None
    finish_reason: str | None = None
    stop_reason: Any = None
    """vLLM's and SGLang's: the stop string that ended the text; None for its own end, where it is said at all."""
    logprobs: Logprobs | None = None
    choice_logprobs: tuple[ScoredChoice, ...] = ()
    """`tot serve`'s: of the choices it was to score."""

    @property
    def tells_stops(self) -> bool:
        """True where the server tells a stop string from the model's own end."""
        return "stop_reason" in self.model_fields_set

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


class ModelName(_Reply):
    id: str


class ModelNames(_Reply):
    """Of /models."""

    data: tuple[ModelName, ...]
