"""Pydantic models of the replies of OpenAI-compatible servers, with the fields that the client reads.

Servers omit fields, set them to null or spell them differently, so fields that do not affect the text are parsed
leniently. A reply without text is invalid. Thinking arrives in a separate field (`reasoning_content`, `reasoning`), as
parts of the content, or between tags in the text.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import zip_longest
from typing import Annotated, Any

from pydantic import (
    AliasChoices,
    AliasPath,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    field_validator,
    model_validator,
)

from tot.decoders.request import ChoiceLogprob
from tot.decoders.thinking import split

_BROKEN_OFF = {"abort", "aborted", "cancelled", "error", "failed", "timeout"}
"""Finish reasons of a server that stopped or failed during a reply."""


def _count(given: Any) -> int | None:
    """Parse a number of tokens; None for null, negative numbers and anything else that is not a count."""
    if isinstance(given, bool) or not isinstance(given, int | float | str):
        return None
    try:
        count = int(float(given))
    except (ValueError, OverflowError):
        return None
    return count if count >= 0 else None


def _text(given: Any) -> str | None:
    return given if isinstance(given, str) else None


def _fields(given: Any) -> Any:
    return given if isinstance(given, Mapping) else None


def _null_as_empty(given: Any) -> Any:
    """Return an empty tuple for null, which vLLM sends."""
    return () if given is None else given


Count = Annotated[int | None, BeforeValidator(_count)]
MaybeText = Annotated[str | None, BeforeValidator(_text)]


class _Reply(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")


class Tokens(_Reply):
    """The `usage` of a reply."""

    prompt_tokens: Count = None
    completion_tokens: Count = None
    cached_tokens: Annotated[Count, Field(validation_alias=AliasPath("prompt_tokens_details", "cached_tokens"))] = None


class Place(_Reply):
    """One new token."""

    token: MaybeText = None
    logprob: float | None = None


class Logprobs(_Reply):
    """Logprobs of new tokens: `content` from the chat route, the other fields (one entry a token) from completions."""

    content: tuple[Place, ...] | None = None
    tokens: tuple[MaybeText, ...] | None = None
    token_logprobs: tuple[float | None, ...] | None = None
    top_logprobs: tuple[dict[str, float] | None, ...] | None = None

    @property
    def drawn(self) -> tuple[tuple[str | None, float | None], ...]:
        """The text and the logprob of each token."""
        if self.content is not None:
            return tuple((place.token, place.logprob) for place in self.content)
        logprobs = self.token_logprobs or ()
        return tuple(zip_longest((self.tokens or ())[: len(logprobs)], logprobs))


class ReplyMessage(_Reply):
    content: str | None = None
    reasoning_content: MaybeText = None
    reasoning: MaybeText = None
    refusal: MaybeText = None

    @model_validator(mode="before")
    @classmethod
    def _joined(cls, given: Any) -> Any:
        """Join the texts of a content that consists of parts, with the thinking in a separate field."""
        if not isinstance(given, Mapping) or not isinstance(given.get("content"), list):
            return given
        fields: dict[str, list[str]] = {"content": [], "reasoning_content": [], "refusal": []}
        for part in given["content"]:
            kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
            field = _PARTS.get(kind) if isinstance(kind, str) else None
            if field is None:
                raise ValueError(f"content has a part of type {str(kind)[:40]!r}, and only text is supported")
            fields[field].append(_texts_in(part))
        joined = {name: "".join(texts) for name, texts in fields.items()}
        return {**given, **{name: text for name, text in joined.items() if text or name == "content"}}


_PARTS = {
    **dict.fromkeys(("text", "output_text", "str"), "content"),
    **dict.fromkeys(("thinking", "reasoning", "reasoning_text", "redacted_thinking"), "reasoning_content"),
    "refusal": "refusal",
}
"""The field for each type of content part."""


def _texts_in(part: Any) -> str:
    """Return the text of one part, which may contain nested parts."""
    if isinstance(part, list):
        return "".join(map(_texts_in, part))
    if isinstance(part, Mapping):
        return "".join(_texts_in(part[name]) for name in ("text", "thinking", "reasoning", "refusal") if name in part)
    return part if isinstance(part, str) else ""


class Choice(_Reply):
    """One sample."""

    index: Count = None
    text: str | None = None
    message: ReplyMessage | None = Field(None, validation_alias=AliasChoices("message", "delta"))
    finish_reason: MaybeText = None
    stop_reason: Any = Field(None, validation_alias=AliasChoices("stop_reason", "matched_stop"))
    """vLLM and SGLang: the stop string that ended the text; None if the model ended it. Other servers omit it."""
    logprobs: Annotated[Logprobs | None, BeforeValidator(_fields)] = None
    choice_logprobs: Annotated[tuple[ChoiceLogprob, ...], BeforeValidator(_null_as_empty)] = ()
    """`tot serve`: the scores of the request's choices."""
    finish: MaybeText = None
    """`tot serve`: why the text ended, as a `Completion.finish_reason`."""
    token_ids: Annotated[tuple[int, ...], BeforeValidator(_null_as_empty)] = ()
    """`tot serve` and vLLM: the new tokens."""
    token_logprobs: Annotated[tuple[float, ...], BeforeValidator(_null_as_empty)] = ()
    """`tot serve`: the logprob of each new token."""

    @field_validator("finish_reason")
    @classmethod
    def _finished(cls, given: str | None) -> str | None:
        if given is not None and given.lower() in _BROKEN_OFF:
            raise ValueError(f"the server aborted the reply ({given})")
        return given if given is None else given.lower()

    @model_validator(mode="after")
    def _has_a_text(self) -> Choice:
        if self.text is None and self.message is None:
            raise ValueError("a choice has neither a message nor a text")
        return self

    @property
    def tells_stops(self) -> bool:
        """True if the server reports which stop string ended a text."""
        return "stop_reason" in self.model_fields_set


class ServerReply(_Reply):
    """A reply of the chat or the completions route."""

    choices: Annotated[tuple[Choice, ...], Field(min_length=1)]
    usage: Annotated[Tokens | None, BeforeValidator(_fields)] = None


class TokenIds(_Reply):
    """A reply of vLLM's or SGLang's /tokenize."""

    tokens: tuple[int, ...]


def apart(choice: Choice, pieces: bool = False) -> tuple[str, str]:
    """Split a choice into (text, thinking). The text is empty if the thinking is not finished.

    In a message that is decoded in `pieces`, thinking between tags is text.
    """
    if choice.message is None:
        text, thinking = choice.text or "", ""
    else:
        text = choice.message.content or choice.message.refusal or ""
        thinking = choice.message.reasoning_content or choice.message.reasoning or ""
    if choice.finish is None and not pieces:  # `tot serve` has separated them
        more, text = split(text)
        thinking += more
    return text, thinking


def without_surrogates(found: Any) -> Any:
    """Replace lone surrogates in JSON data, as they cannot be encoded as UTF-8."""
    if isinstance(found, str):
        return found.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    if isinstance(found, list):
        return [without_surrogates(item) for item in found]
    if isinstance(found, dict):
        return {without_surrogates(name): without_surrogates(value) for name, value in found.items()}
    return found
