"""Read the replies of OpenAI-compatible servers, and convert them to completions.

Servers omit fields, set them to null or spell them differently, so fields that do not affect the text are parsed
leniently. A reply without text is invalid. Thinking arrives in a separate field (`reasoning_content`, `reasoning`), as
parts of the content, or between tags in the text.
"""

from __future__ import annotations

import json
import logging
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, cast, get_args

from pydantic import AliasChoices, AliasPath, BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from tot.decoders.errors import RequestError
from tot.decoders.request import ChoiceLogprob, Completion, FinishReason, Part, Sampling, ToolCall, Usage, before_stop
from tot.decoders.thinking import end_of, forced_end, split
from tot.decoders.tools import TAGGED

log = logging.getLogger(__name__)

# Finish reasons of OpenAI, TGI, Anthropic, Cohere, Gemini, Mistral and Bedrock. "stop" may be a stop string or the
# model's own end.
_FILTERED = re.compile(r"filter|safety|recitation|blocklist|prohibited|spii|toxic|guardrail|refusal|sensitive")
_TOOLS = re.compile(r"tool|function_call")
_BROKEN_OFF = re.compile(r"abort|cancel|error|failed|timeout")
_LENGTH = re.compile(r"length|limit|max_|incomplete|exceeded")
_STOP = re.compile(r"stop_(?:seq|str|word)")
_EOS = re.compile(r"eos|end_?of|end_turn|complete")
_THINKING = re.compile(r"thinking|reasoning")
"""Types of parts of a message."""
_MIN_LOGPROB = -9999.0
"""OpenAI's logprob for very unlikely tokens. It replaces minus infinity, which other servers return."""


def _count(given: Any) -> int | None:
    """Parse a number of tokens; None for null, negative numbers and anything else that is not a count."""
    try:
        count = -1 if isinstance(given, bool) else int(float(given))
    except (TypeError, ValueError, OverflowError):
        return None
    return count if count >= 0 else None


def _text(given: Any) -> Any:
    """Replace lone surrogates in a text, as they cannot be encoded as UTF-8."""
    return given.encode("utf-16", "surrogatepass").decode("utf-16", "replace") if isinstance(given, str) else given


_Count = Annotated[int | None, BeforeValidator(_count)]
_MaybeText = Annotated[str | None, BeforeValidator(lambda given: _text(given) if isinstance(given, str) else None)]
_MaybeFields = BeforeValidator(lambda given: given if isinstance(given, Mapping) else None)
_NullAsEmpty = BeforeValidator(lambda given: () if given is None else given)


class _Reply(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")


class Tokens(_Reply):
    """The `usage` of a reply."""

    prompt_tokens: _Count = None
    completion_tokens: _Count = None
    cached_tokens: Annotated[_Count, Field(validation_alias=AliasPath("prompt_tokens_details", "cached_tokens"))] = None
    reasoning_tokens: Annotated[
        _Count, Field(validation_alias=AliasPath("completion_tokens_details", "reasoning_tokens"))
    ] = None


class Logprobs(_Reply):
    """Logprobs of new tokens, one entry a token, as in the completions route."""

    tokens: Annotated[tuple[_MaybeText, ...], _NullAsEmpty] = ()
    token_logprobs: Annotated[tuple[float | None, ...], _NullAsEmpty] = ()
    top_logprobs: Annotated[tuple[dict[str, float] | None, ...], _NullAsEmpty] = ()

    @model_validator(mode="before")
    @classmethod
    def _of_chat(cls, given: Mapping[str, Any]) -> Any:
        """Convert the chat route's list of tokens."""
        if not isinstance(content := given.get("content"), list):
            return given
        places = [place for place in content if isinstance(place, Mapping)]
        return {"tokens": [at.get("token") for at in places], "token_logprobs": [at.get("logprob") for at in places]}


class Choice(_Reply):
    """One sample."""

    index: _Count = None
    text: Annotated[str, BeforeValidator(_text)]
    """The text, which may still contain thinking between tags."""
    calls: tuple[ToolCall, ...] = ()
    """The calls of functions after the text."""
    reasoning: _MaybeText = None
    """The thinking, if it has a field of its own."""
    finish_reason: _MaybeText = None
    """In lower case."""
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
    parts: Annotated[tuple[Part, ...], _NullAsEmpty] = ()
    """`tot serve`: as `Completion.parts`."""

    @model_validator(mode="before")
    @classmethod
    def _of_message(cls, given: Any) -> Any:
        """Return the fields with the text and the thinking of the message, if the choice has one."""
        if not isinstance(given, Mapping):
            return given
        finish, message = str(given.get("finish_reason") or "").lower(), given.get("message", given.get("delta"))
        if _BROKEN_OFF.search(finish) and not _FILTERED.search(finish):
            raise ValueError(f"the server aborted the reply ({finish})")
        given = {**given, "finish_reason": finish, "reasoning": None, "calls": ()}
        if not isinstance(message, Mapping):
            if given.get("text") is None:
                raise ValueError("a choice has neither a message nor a text")
            return given
        text, thinking = message.get("content"), message.get("reasoning_content") or message.get("reasoning")
        if isinstance(text, list):  # of parts
            thoughts = [one for one in text if isinstance(one, Mapping) and _THINKING.search(str(one.get("type")))]
            text, thinking = _text_of([part for part in text if part not in thoughts]), _text_of(thoughts) or thinking
        calls = _calls(message.get("tool_calls"))
        return {**given, "text": text or message.get("refusal") or "", "reasoning": thinking, "calls": calls}

    @property
    def stopped_blank(self) -> bool:
        """True if a stop string ended the text before anything but whitespace."""
        return self.finish is None and isinstance(self.stop_reason, str) and not self.text.strip()

    @property
    def problem(self) -> str:
        """Why the choice has no usable text; empty if it has one."""
        if _FILTERED.search(self.finish_reason or ""):
            return f"its content filter cut the reply ({self.finish_reason})"
        if _TOOLS.search(self.finish_reason or "") and not (self.text or self.reasoning or self.calls):
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

    def cut_thinking(self) -> tuple[str, str]:
        """Return a text that has no answer as the beginning of a message, and the end of its thinking."""
        if self.reasoning:
            return (kept := f"<think>\n{self.reasoning}{self.text}"), end_of("</think>", kept)
        return forced_end(self.text) or (self.text, "")


class ServerReply(_Reply):
    """A reply of the chat or the completions route."""

    choices: Annotated[tuple[Choice, ...], Field(min_length=1)]
    usage: Annotated[Tokens | None, _MaybeFields] = None

    @property
    def samples(self) -> list[Choice]:
        """The choices in order."""
        known = all(choice.index is not None for choice in self.choices)
        return sorted(self.choices, key=lambda choice: choice.index or 0) if known else [*self.choices]


class TokenIds(_Reply):
    """A reply of vLLM's or SGLang's /tokenize."""

    tokens: tuple[int, ...]


def _calls(given: Any) -> list[ToolCall]:
    """Read calls. A server may have parsed their arguments, or leave them out."""
    calls = []
    for one in given if isinstance(given, list) else ():
        function = one.get("function") if isinstance(one, Mapping) else None
        if isinstance(function, Mapping) and isinstance(name := function.get("name"), str):
            arguments = function.get("arguments") or "{}"
            written = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
            calls.append(ToolCall(name=name, arguments=written))
    return calls


def _text_of(part: Any) -> str:
    """Return the text of a part of a message, which may contain nested parts."""
    if isinstance(part, list):
        return "".join(map(_text_of, part))
    if isinstance(part, Mapping):
        return "".join(_text_of(part[name]) for name in ("text", "thinking", "reasoning", "refusal") if name in part)
    return part if isinstance(part, str) else ""


def completions_of(
    reply: ServerReply, sampling: Sampling, logprobs: bool, used: Usage, stops_sent: bool
) -> list[Completion]:
    """Return one completion per choice, in order: its thinking, if any, and its text, with calls as in `TAGGED`.

    The first one has the usage of the prompt. New tokens are split evenly, as servers report their total. `stops_sent`:
    whether the server got the stop strings.

    Raises:
        RequestError: Requested logprobs are missing, or the reply has no text: it was filtered, or is a tool call.
    """
    choices = reply.samples
    if all(choice.problem for choice in choices):
        raise no_text(choices[0])
    share, rest = divmod(used.new_tokens, len(choices))
    samples = []
    for i, choice in enumerate(choices):
        whole, thinking = choice.apart(sampling.keep_stop)
        text, reason = _ended(choice, whole, sampling, stops_sent)
        if choice.calls and text == whole:
            text = "\n".join(filter(None, (text, TAGGED.write(choice.calls))))
            reason = reason if reason == "length" else "eos"
        if choice.problem:
            log.warning('one of %d samples gets the finish reason "length": %s', len(choices), choice.problem)
            text, reason = whole, "length"
        new = share + (i < rest)
        usage = replace(used, new_tokens=new) if i == 0 else Usage(new_tokens=new, seconds=used.seconds)
        values: tuple[float, ...] | None = choice.token_logprobs
        if not choice.token_ids:
            values = _logprobs(choice, whole, text) if logprobs and not choice.calls else None
        total = math.nan if values is None else math.fsum(values)
        known = reply.usage.reasoning_tokens if reply.usage and thinking and len(choices) == 1 else None
        thought = min(known or 0, new)
        exact = Part("exact", text, new - thought)
        parts: tuple[Part, ...] = (Part("thinking", thinking, thought), exact) if thinking else (exact,)
        if choice.parts:
            parts = (*choice.parts[:-1], replace(choice.parts[-1], text=text)) if choice.calls else choice.parts
        elif sampling.keep_stop:  # the search finds the thinking of a piece
            parts = ()
        samples.append(Completion(text, choice.token_ids, total, reason, usage, parts=parts, logprobs=values or ()))
    return samples


def no_text(choice: Choice) -> RequestError:
    """Return the error for a choice with a problem."""
    return RequestError(f"the server returned no text: {choice.problem}")


def _ended(choice: Choice, text: str, sampling: Sampling, stops_sent: bool) -> tuple[str, FinishReason]:
    """Truncate the text at its end and return it with the finish reason."""
    if choice.finish in get_args(FinishReason):
        return text, cast(FinishReason, choice.finish)
    reason = _reason(choice, bool(sampling.stop) and stops_sent)
    if sampling.keep_stop:
        return _with_stop(choice, text, sampling.stop, reason, stops_sent)
    cut = before_stop(text, sampling.stop)
    return (text, reason) if cut == text else (cut, "stop")  # some servers keep stop strings


def _with_stop(
    choice: Choice, text: str, stops: Sequence[str], reason: FinishReason, stops_sent: bool
) -> tuple[str, FinishReason]:
    """Truncate a text after its stop string, and return it with the finish reason.

    The server reports the stop string; a text requested without stop strings is truncated here. As in
    `Sampling.keep_stop`, a stop string after nothing but whitespace does not end a text. A text ends between two
    tokens, and a space belongs to the word after it.
    """
    begin = len(text) - len(text.lstrip())
    spans = [(at, at + len(stop)) for stop in stops if (at := text.find(stop, begin + 1)) >= 0]
    if spans:
        rest = text[min(spans)[1] :].lstrip()
        ended_by_stop = rest or stops_sent  # otherwise the model ended the text there
        return (text[: len(text) - len(rest)].rstrip(" "), "stop") if ended_by_stop else (text, reason)
    if stops_sent and reason != "length" and isinstance(choice.stop_reason, str):
        return (text + choice.stop_reason).rstrip(" "), "stop"
    return text, reason


def _reason(choice: Choice, may_be_stopped: bool) -> FinishReason:
    finish = choice.finish_reason or ""
    if _LENGTH.search(finish):
        return "length"
    if _EOS.search(finish):
        return "eos"
    tells_stops = "stop_reason" in choice.model_fields_set
    stopped = isinstance(choice.stop_reason, str) or (may_be_stopped and not tells_stops)
    return "stop" if stopped or _STOP.search(finish) else "eos"


def _logprobs(choice: Choice, whole: str, text: str) -> tuple[float, ...]:
    """Return the logprobs of the tokens of `text`, a prefix of the `whole` text. Raises RequestError without them."""
    given = choice.logprobs or Logprobs()
    values = [max(one, _MIN_LOGPROB) for one in given.token_logprobs if one is not None and not math.isnan(one)]
    if len(values) < len(given.token_logprobs) or (not values and (whole or choice.logprobs is None)):
        raise RequestError("the server returned no log-probabilities: remove the option logprobs or use another server")
    length = count = 0
    while len(text) < len(whole) and count < len(values) and length < len(text):
        length += len(given.tokens[count] or "") if count < len(given.tokens) else 0
        count += 1
    return tuple(values if len(text) >= len(whole) else values[:count])
