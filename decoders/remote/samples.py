"""From a server's reply to samples: the text apart from the thinking, why it ended, log-probabilities and tokens."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import cast, get_args

from tot.decoders.errors import RequestError
from tot.decoders.remote.reply import Choice, ServerReply, apart
from tot.decoders.request import FinishReason, Part, Sampling, Usage

log = logging.getLogger(__name__)

_LENGTH = {
    *("length", "limit", "token_limit", "incomplete", "max_tokens", "max_new_tokens", "max_output_tokens"),
    *("max_completion_tokens", "max_length", "model_length", "context_length_exceeded"),
    "model_context_window_exceeded",
}
_STOP = {"stop_sequence", "stop_string", "stop_str", "stop_word", "stop_words"}
_EOS = {"eos", "eos_token", "end_turn", "end_of_turn", "end_of_text", "endoftext", "complete", "completed"}
_FILTERED = {
    *("content_filter", "content_filtered", "safety", "recitation", "blocklist", "prohibited_content", "spii"),
    *("error_toxic", "guardrail_intervened", "refusal", "sensitive"),
}
_TOOLS = {"tool_calls", "tool_call", "tool_use", "function_call"}
"""Finish reasons of OpenAI, TGI, Anthropic, Cohere, Gemini, Mistral and Bedrock, in lower case; `stop` may be a stop
string or the model's own end."""
_IMPOSSIBLE = -9999.0
"""What OpenAI gives for tokens that are next to impossible, where others give minus infinity, which has no sums."""


@dataclass(frozen=True, slots=True)
class RemoteSample:
    """One text that a server wrote, and its share of the usage."""

    text: str
    thinking: str
    finish_reason: FinishReason
    logprob: float
    usage: Usage
    logprobs: tuple[float, ...] = ()
    """Of each token, if the server was asked for them."""
    tokens: tuple[int, ...] = ()
    """The tokens drawn, if the server gives them."""

    @property
    def parts(self) -> tuple[Part, ...]:
        """The thinking, if there is any, and the text."""
        thinking = (Part("thinking", self.thinking),) if self.thinking else ()
        return (*thinking, Part("exact", self.text, self.usage.new_tokens))


CUT = RemoteSample("", "", "budget", 0.0, Usage())
"""Where a budget was spent before a request was sent, or answered."""


class UnknownEndError(Exception):
    """The server does not report which stop string ended a text that is to keep it; `blank` where it came first."""

    def __init__(self, blank: bool) -> None:
        super().__init__()
        self.blank = blank


def samples_of(
    reply: ServerReply,
    sampling: Sampling,
    logprobs: bool,
    used: Usage,
    stops_sent: bool = True,
    beginning: str = "",
) -> list[RemoteSample]:
    """A sample for each choice, in order. The first carries the usage of the prompt and the cost; new tokens that a
    server counts for all samples together are split evenly. `beginning` is an assistant message that the server was to
    continue, and may have repeated.

    Raises:
        RequestError: Log-probabilities were asked for and are missing, or there is no text: filtered, or a tool call.
        UnknownEndError: The text is to keep its stop string (`keep_stop`), and no one can tell which it was.
    """
    choices = list(reply.choices)
    if all(choice.index is not None for choice in choices):
        choices.sort(key=lambda choice: choice.index or 0)
    problems = [problem_with(choice) for choice in choices]
    if all(problems):
        raise no_text(problems[0])
    new = _shares(choices, used.new_tokens)
    done = []
    for i, choice in enumerate(choices):
        written, thinking = apart(choice)
        if beginning:
            written = _without(beginning, written)
        ended: tuple[str, FinishReason] = (written, "length")
        if problems[i]:
            log.warning("one of %d samples counts as cut: %s", len(choices), problems[i])
        else:
            ended = _ended(choice, written, sampling, stops_sent)
        text, reason = ended
        usage = replace(used, new_tokens=new[i]) if i == 0 else Usage(new_tokens=new[i], seconds=used.seconds)
        each: tuple[float, ...] | None = choice.token_logprobs
        if not choice.token_ids:
            each = _logprobs(choice, written, text) if logprobs else None
        total = math.nan if each is None else math.fsum(each)
        done.append(RemoteSample(text, thinking, reason, total, usage, each or (), choice.token_ids))
    return done


def _without(beginning: str, text: str) -> str:
    """The text after a beginning that it repeats, with or without the blanks around it."""
    for repeated in (beginning.lstrip(), beginning.strip()):
        if text.lstrip().startswith(repeated):
            return text.lstrip().removeprefix(repeated)
    return text


def no_text(problem: str) -> RequestError:
    """The error for a reply that `problem_with` finds unusable."""
    return RequestError(f"the server gives no text: {problem}")


def problem_with(choice: Choice) -> str:
    """Why a choice is no text that can be used; empty where it is one."""
    if choice.finish_reason in _FILTERED:
        return f"its content filter cut the reply ({choice.finish_reason})"
    if choice.finish_reason in _TOOLS and not any(apart(choice)):
        return f"the reply is a tool call without a text ({choice.finish_reason})"
    return ""


def _ended(choice: Choice, text: str, sampling: Sampling, stops_sent: bool) -> tuple[str, FinishReason]:
    """The text up to where it ends, and why it ends there."""
    if choice.finish in get_args(FinishReason):
        return text, cast(FinishReason, choice.finish)
    reason = _reason(choice, bool(sampling.stop) and stops_sent)
    if sampling.keep_stop:
        return _with_stop(choice, text, sampling.stop, reason, stops_sent)
    cut = text[: min((at for stop in sampling.stop if (at := text.find(stop)) >= 0), default=len(text))]
    return (text, reason) if cut == text else (cut, "stop")  # some servers leave stop strings in


def _with_stop(
    choice: Choice, text: str, stops: Sequence[str], reason: FinishReason, stops_sent: bool
) -> tuple[str, FinishReason]:
    """The same for a text that keeps its stop string: from a server that leaves it in or reports it, or from a whole
    text, which is cut here. As in `Sampling.keep_stop`, blanks before a stop string are not a text to end, and the text
    ends between two tokens: a space belongs to the word after it."""
    begins = len(text) - len(text.lstrip())
    found = [(at, at + len(stop)) for stop in stops if (at := text.find(stop, begins + 1)) >= 0]
    if found:
        end = min(found)[1]
        rest = text[end:].lstrip()
        ended_by_stop = rest or stops_sent  # else the model itself ended it right there
        return (text[: len(text) - len(rest)].rstrip(" "), "stop") if ended_by_stop else (text, reason)
    if not stops_sent or reason == "length":
        return text, reason
    told = choice.stop_reason
    if choice.finish_reason in _EOS or (choice.tells_stops and not isinstance(told, str)):
        return text, "eos"
    stop = told if told in stops else stops[0] if choice.finish_reason in _STOP and len(stops) == 1 else None
    if stop is None or not text.strip():
        raise UnknownEndError(blank=not text.strip())
    return (text + stop).rstrip(" "), "stop"


def _reason(choice: Choice, may_be_stopped: bool) -> FinishReason:
    finish = choice.finish_reason
    if finish in _LENGTH:
        return "length"
    if finish in _EOS:
        return "eos"
    if finish in _STOP or isinstance(choice.stop_reason, str):
        return "stop"
    return "stop" if may_be_stopped and not choice.tells_stops else "eos"


def _shares(choices: Sequence[Choice], total: int) -> list[int]:
    counted = [len(choice.logprobs.drawn) if choice.logprobs is not None else 0 for choice in choices]
    if sum(counted) == total and all(counted):
        return counted
    share, rest = divmod(total, len(choices))
    return [share + (i < rest) for i in range(len(choices))]


def _logprobs(choice: Choice, written: str, text: str) -> tuple[float, ...]:
    """Those of the tokens of `text`, which is `written` or its beginning."""
    drawn = choice.logprobs.drawn if choice.logprobs is not None else ()
    values = [max(value, _IMPOSSIBLE) for _, value in drawn if value is not None and not math.isnan(value)]
    if len(values) < len(drawn) or (not values and (written or choice.logprobs is None)):
        raise RequestError("the server gives no log-probabilities: leave logprobs out, or ask one that does")
    if len(text) >= len(written):
        return tuple(values)
    length, kept = 0, 0
    while kept < len(drawn) and length < len(text):
        length += len(drawn[kept][0] or "")
        kept += 1
    return tuple(values[:kept])
