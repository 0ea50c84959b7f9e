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
    AfterValidator,
    AliasChoices,
    AliasPath,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    model_validator,
)

from tot.decoders.request import ChoiceLogprob
from tot.decoders.thinking import split

_FILTERED = {
    *("content_filter", "content_filtered", "safety", "recitation", "blocklist", "prohibited_content", "spii"),
    *("error_toxic", "guardrail_intervened", "refusal", "sensitive"),
}
_TOOLS = {"tool_calls", "tool_call", "tool_use", "function_call"}
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


def _without_surrogates(given: Any) -> Any:
    """Replace lone surrogates in a text, as they cannot be encoded as UTF-8."""
    return given.encode("utf-16", "surrogatepass").decode("utf-16", "replace") if isinstance(given, str) else given


_Count = Annotated[int | None, BeforeValidator(_count)]
_Text = BeforeValidator(_without_surrogates)
_MaybeText = Annotated[str | None, BeforeValidator(lambda given: given if isinstance(given, str) else None), _Text]
_MaybeFields = BeforeValidator(lambda given: given if isinstance(given, Mapping) else None)
_NullAsEmpty = BeforeValidator(lambda given: () if given is None else given)


class _Reply(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")


class Tokens(_Reply):
    """The `usage` of a reply."""

    prompt_tokens: _Count = None
    completion_tokens: _Count = None
    cached_tokens: Annotated[_Count, Field(validation_alias=AliasPath("prompt_tokens_details", "cached_tokens"))] = None


class Place(_Reply):
    """One new token."""

    token: _MaybeText = None
    logprob: float | None = None


class Logprobs(_Reply):
    """Logprobs of new tokens: `content` from the chat route, the other fields (one entry a token) from completions."""

    content: tuple[Place, ...] | None = None
    tokens: tuple[_MaybeText, ...] | None = None
    token_logprobs: tuple[float | None, ...] | None = None
    top_logprobs: tuple[dict[str, float] | None, ...] | None = None

    @property
    def drawn(self) -> tuple[tuple[str | None, float | None], ...]:
        """The text and the logprob of each token."""
        if self.content is not None:
            return tuple((place.token, place.logprob) for place in self.content)
        logprobs = self.token_logprobs or ()
        return tuple(zip_longest((self.tokens or ())[: len(logprobs)], logprobs))


class Choice(_Reply):
    """One sample."""

    index: _Count = None
    text: Annotated[str, _Text]
    """The text, which may still contain thinking between tags."""
    reasoning: _MaybeText = None
    """The thinking, if it has a field of its own."""
    finish_reason: Annotated[_MaybeText, AfterValidator(lambda given: given and given.lower())] = None
    stop_reason: Any = Field(None, validation_alias=AliasChoices("stop_reason", "matched_stop"))
    """vLLM and SGLang: the stop string that ended the text; None if the model ended it. Other servers omit it."""
    logprobs: Annotated[Logprobs | None, _MaybeFields] = None
    choice_logprobs: Annotated[tuple[ChoiceLogprob, ...], _NullAsEmpty] = ()
    """`tot serve`: the scores of the request's choices."""
    finish: _MaybeText = None
    """`tot serve`: why the text ended, as a `Completion.finish_reason`."""
    token_ids: Annotated[tuple[int, ...], _NullAsEmpty] = ()
    """`tot serve` and vLLM: the new tokens."""
    token_logprobs: Annotated[tuple[float, ...], _NullAsEmpty] = ()
    """`tot serve`: the logprob of each new token."""

    @model_validator(mode="before")
    @classmethod
    def _of_message(cls, given: Any) -> Any:
        """Return the fields with the text and the thinking of the message, if the choice has one."""
        if not isinstance(given, Mapping):
            return given
        finish, message = given.get("finish_reason"), given.get("message", given.get("delta"))
        if isinstance(finish, str) and finish.lower() in _BROKEN_OFF:
            raise ValueError(f"the server aborted the reply ({finish})")
        if not isinstance(message, Mapping):
            if given.get("text") is None:
                raise ValueError("a choice has neither a message nor a text")
            return {**given, "reasoning": None}
        text, texts = message.get("content"), {"text": "", "reasoning": "", "refusal": ""}
        if isinstance(text, list):
            for part in text:
                kind = str(part.get("type")) if isinstance(part, Mapping) else type(part).__name__
                if kind not in _PARTS:
                    raise ValueError(f"content has a part of type {kind[:40]!r}, and only text is supported")
                texts[_PARTS[kind]] += _text_of(part)
            text = texts["text"]
        reasoning = texts["reasoning"] or message.get("reasoning_content") or message.get("reasoning")
        return {**given, "text": text or texts["refusal"] or message.get("refusal") or "", "reasoning": reasoning}

    @property
    def tells_stops(self) -> bool:
        """True if the server reports which stop string ended a text."""
        return "stop_reason" in self.model_fields_set

    @property
    def stopped_blank(self) -> bool:
        """True if a stop string ended the text before anything but whitespace."""
        return self.finish is None and isinstance(self.stop_reason, str) and not self.text.strip()

    @property
    def problem(self) -> str:
        """Why the choice has no usable text; empty if it has one."""
        if self.finish_reason in _FILTERED:
            return f"its content filter cut the reply ({self.finish_reason})"
        if self.finish_reason in _TOOLS and not (self.text or self.reasoning):
            return f"the reply is a tool call without a text ({self.finish_reason})"
        return ""

    def apart(self, pieces: bool = False) -> tuple[str, str]:
        """Split the choice into (text, thinking). The text is empty if the thinking is not finished.

        In a message that is decoded in `pieces`, thinking between tags is text.
        """
        if self.finish is not None or pieces:  # `tot serve` has separated them
            return self.text, self.reasoning or ""
        thinking, text = split(self.text)
        return text, (self.reasoning or "") + thinking


class ServerReply(_Reply):
    """A reply of the chat or the completions route."""

    choices: Annotated[tuple[Choice, ...], Field(min_length=1)]
    usage: Annotated[Tokens | None, _MaybeFields] = None


class TokenIds(_Reply):
    """A reply of vLLM's or SGLang's /tokenize."""

    tokens: tuple[int, ...]


_PARTS = {
    **dict.fromkeys(("text", "output_text", "str"), "text"),
    **dict.fromkeys(("thinking", "reasoning", "reasoning_text", "redacted_thinking"), "reasoning"),
    "refusal": "refusal",
}
"""The field for each type of content part."""


def _text_of(part: Any) -> str:
    """Return the text of one part, which may contain nested parts."""
    if isinstance(part, list):
        return "".join(map(_text_of, part))
    if isinstance(part, Mapping):
        return "".join(_text_of(part[name]) for name in ("text", "thinking", "reasoning", "refusal") if name in part)
    return part if isinstance(part, str) else ""
