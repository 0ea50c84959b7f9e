"""Convert a server's reply to samples: text, thinking, finish reason, logprobs and tokens."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import cast, get_args

from tot.decoders.errors import RequestError
from tot.decoders.remote.reply import Choice, ServerReply, apart
from tot.decoders.request import Completion, FinishReason, Part, Sampling, Usage, before_stop

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
"""OpenAI's logprob for very unlikely tokens. It replaces minus infinity, which other servers return."""


CUT = Completion("", (), 0.0, "budget", Usage(), parts=(Part("exact", ""),))
"""The completion of a request whose budget was spent before the reply."""


class UnknownEndError(Exception):
    """The server does not report which stop string ended a `keep_stop` text; `blank` if the text is empty."""

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
) -> list[Completion]:
    """Return one completion per choice, in order: its thinking, if there is any, and its text.

    The first one has the usage of the prompt and the cost. New tokens are split evenly if the server reports only a
    total. `beginning` is the assistant message to continue, which is removed if the server repeated it.

    Raises:
        RequestError: Requested logprobs are missing, or the reply has no text: it was filtered, or is a tool call.
        UnknownEndError: The text should keep its stop string (`keep_stop`), and the stop string is unknown.
    """
    choices = list(reply.choices)
    if all(choice.index is not None for choice in choices):
        choices.sort(key=lambda choice: choice.index or 0)
    problems = [problem_with(choice) for choice in choices]
    if all(problems):
        raise no_text(problems[0])
    new = _shares(choices, used.new_tokens)
    samples = []
    for i, choice in enumerate(choices):
        full_text, thinking = apart(choice, sampling.keep_stop)
        if beginning:
            full_text = _without(beginning, full_text)
        ended: tuple[str, FinishReason] = (full_text, "length")
        if problems[i]:
            log.warning('one of %d samples gets the finish reason "length": %s', len(choices), problems[i])
        else:
            ended = _ended(choice, full_text, sampling, stops_sent)
        text, reason = ended
        usage = replace(used, new_tokens=new[i]) if i == 0 else Usage(new_tokens=new[i], seconds=used.seconds)
        values: tuple[float, ...] | None = choice.token_logprobs
        if not choice.token_ids:
            values = _logprobs(choice, full_text, text) if logprobs else None
        total = math.nan if values is None else math.fsum(values)
        exact = Part("exact", text.removeprefix(thinking) if sampling.keep_stop else text, usage.new_tokens)
        parts: tuple[Part, ...] = (Part("thinking", thinking), exact) if thinking else (exact,)
        if sampling.keep_stop and not thinking:  # the search finds the thinking of a piece
            parts = ()
        samples.append(Completion(text, choice.token_ids, total, reason, usage, parts=parts, logprobs=values or ()))
    return samples


def _without(beginning: str, text: str) -> str:
    """Remove a repeated beginning from a text, ignoring whitespace around the beginning."""
    for repeated in (beginning.lstrip(), beginning.strip()):
        if text.lstrip().startswith(repeated):
            return text.lstrip().removeprefix(repeated)
    return text


def no_text(problem: str) -> RequestError:
    """Return the error for a reply without usable text; `problem` is from `problem_with`."""
    return RequestError(f"the server returned no text: {problem}")


def problem_with(choice: Choice) -> str:
    """Return why a choice has no usable text; empty if it has one."""
    if choice.finish_reason in _FILTERED:
        return f"its content filter cut the reply ({choice.finish_reason})"
    if choice.finish_reason in _TOOLS and not any(apart(choice)):
        return f"the reply is a tool call without a text ({choice.finish_reason})"
    return ""


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

    The server keeps the stop string or reports it; a text requested without stop strings is truncated here. As in
    `Sampling.keep_stop`, a stop string after nothing but whitespace does not end a text. A text ends between two
    tokens, and a space belongs to the word after it.
    """
    begin = len(text) - len(text.lstrip())
    spans = [(at, at + len(stop)) for stop in stops if (at := text.find(stop, begin + 1)) >= 0]
    if spans:
        end = min(spans)[1]
        rest = text[end:].lstrip()
        ended_by_stop = rest or stops_sent  # otherwise the model ended the text there
        return (text[: len(text) - len(rest)].rstrip(" "), "stop") if ended_by_stop else (text, reason)
    if not stops_sent or reason == "length":
        return text, reason
    reported = choice.stop_reason
    if choice.finish_reason in _EOS or (choice.tells_stops and not isinstance(reported, str)):
        return text, "eos"
    stop = reported if reported in stops else stops[0] if choice.finish_reason in _STOP and len(stops) == 1 else None
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


def _logprobs(choice: Choice, full_text: str, text: str) -> tuple[float, ...]:
    """Return the logprobs of the tokens of `text`, a prefix of `full_text`."""
    drawn = choice.logprobs.drawn if choice.logprobs is not None else ()
    values = [max(value, _IMPOSSIBLE) for _, value in drawn if value is not None and not math.isnan(value)]
    if len(values) < len(drawn) or (not values and (full_text or choice.logprobs is None)):
        raise RequestError("the server returned no log-probabilities: remove the option logprobs or use another server")
    if len(text) >= len(full_text):
        return tuple(values)
    length, count = 0, 0
    while count < len(drawn) and length < len(text):
        length += len(drawn[count][0] or "")
        count += 1
    return tuple(values[:count])
