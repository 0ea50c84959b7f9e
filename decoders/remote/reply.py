"""What OpenAI-compatible servers reply, as far as it is read here.

Servers differ in what they leave out, set to null or spell otherwise; what a text does not depend on is read leniently.
A reply without a text is broken, as one is that is not JSON. A thinking model's thoughts come in a field of their own
(`reasoning_content`, `reasoning`), as parts of the content, or as a `<think>` block.
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

_OPEN, _CLOSE = "<think>", "</think>"
_BROKEN_OFF = {"abort", "aborted", "cancelled", "error", "failed", "timeout"}
"""Finish reasons of a server that was shut down or failed in mid-reply."""


def _count(given: Any) -> int | None:
    """A number of tokens; None for null, a negative number and whatever else is no count."""
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


Count = Annotated[int | None, BeforeValidator(_count)]
MaybeText = Annotated[str | None, BeforeValidator(_text)]


class _Reply(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")


class Tokens(_Reply):
    """A reply's `usage`: its tokens, where it counts them."""

    prompt_tokens: Count = None
    completion_tokens: Count = None
    cached_tokens: Annotated[Count, Field(validation_alias=AliasPath("prompt_tokens_details", "cached_tokens"))] = None


class Place(_Reply):
    """A token drawn."""

    token: MaybeText = None
    logprob: float | None = None


class Logprobs(_Reply):
    """`content` is chat's; the lists, one entry a token, are completions' own."""

    content: tuple[Place, ...] | None = None
    tokens: tuple[MaybeText, ...] | None = None
    token_logprobs: tuple[float | None, ...] | None = None
    top_logprobs: tuple[dict[str, float] | None, ...] | None = None

    @property
    def drawn(self) -> tuple[tuple[str | None, float | None], ...]:
        """Each token as text and its log-probability."""
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
        """The texts of a content of parts, joined; those of thinking apart."""
        if not isinstance(given, Mapping) or not isinstance(given.get("content"), list):
            return given
        said: dict[str, list[str]] = {"content": [], "reasoning_content": [], "refusal": []}
        for part in given["content"]:
            kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
            place = _PARTS.get(kind) if isinstance(kind, str) else None
            if place is None:
                raise ValueError(f"content has a part of type {str(kind)[:40]!r}, and only text can be read")
            said[place].append(_texts_in(part))
        joined = {name: "".join(texts) for name, texts in said.items()}
        return {**given, **{name: text for name, text in joined.items() if text or name == "content"}}


_PARTS = {
    **dict.fromkeys(("text", "output_text", "str"), "content"),
    **dict.fromkeys(("thinking", "reasoning", "reasoning_text", "redacted_thinking"), "reasoning_content"),
    "refusal": "refusal",
}
"""What the parts of a content hold, by their types."""


def _texts_in(part: Any) -> str:
    """The text of one part, which may itself hold parts."""
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
    """vLLM's and SGLang's: the stop string that ended the text; None for its own end, where it is said at all."""
    logprobs: Annotated[Logprobs | None, BeforeValidator(_fields)] = None
    choice_logprobs: tuple[ChoiceLogprob, ...] = ()
    """`tot serve`'s: of the choices it was to score."""
    finish: MaybeText = None
    """`tot serve`'s: why the text ended, in the words of `Completion.finish_reason`."""
    token_ids: tuple[int, ...] = ()
    """`tot serve`'s: the tokens drawn."""
    token_logprobs: tuple[float, ...] = ()
    """`tot serve`'s: of each of them."""

    @field_validator("finish_reason")
    @classmethod
    def _finished(cls, given: str | None) -> str | None:
        if given is not None and given.lower() in _BROKEN_OFF:
            raise ValueError(f"the text was broken off ({given})")
        return given if given is None else given.lower()

    @model_validator(mode="after")
    def _has_a_text(self) -> Choice:
        if self.text is None and self.message is None:
            raise ValueError("it has neither a message nor a text")
        return self

    @property
    def tells_stops(self) -> bool:
        """Whether the server reports what ended the text, apart from its own end."""
        return "stop_reason" in self.model_fields_set


class ServerReply(_Reply):
    """Of chat and completions alike."""

    choices: Annotated[tuple[Choice, ...], Field(min_length=1)]
    usage: Annotated[Tokens | None, BeforeValidator(_fields)] = None


class TokenIds(_Reply):
    """Of vLLM's and SGLang's /tokenize."""

    tokens: tuple[int, ...]


def apart(choice: Choice) -> tuple[str, str]:
    """(text, thinking) of what was written. A block that was opened and never closed is thinking that was cut: there
    is no text."""
    if choice.message is None:
        text, thinking = choice.text or "", ""
    else:
        text = choice.message.content or choice.message.refusal or ""
        thinking = choice.message.reasoning_content or choice.message.reasoning or ""
    opened = text.lstrip()
    if opened.startswith(_OPEN):
        block, closed, text = opened.removeprefix(_OPEN).partition(_CLOSE)
        return (text.lstrip() if closed else ""), thinking + block
    if _CLOSE in text:  # the template opened it, in the prompt
        block, _, text = text.partition(_CLOSE)
        return text.lstrip(), thinking + block
    return text, thinking


def without_surrogates(found: Any) -> Any:
    """JSON data with half surrogates replaced, which no text file and no other reply can hold."""
    if isinstance(found, str):
        return found.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    if isinstance(found, list):
        return [without_surrogates(one) for one in found]
    if isinstance(found, dict):
        return {without_surrogates(name): without_surrogates(value) for name, value in found.items()}
    return found
