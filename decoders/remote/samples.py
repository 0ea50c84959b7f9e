"""Convert a server's reply to completions: text, thinking, finish reason, logprobs and tokens."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import cast, get_args

from tot.decoders.errors import RequestError
from tot.decoders.remote.reply import Choice, ServerReply
from tot.decoders.request import Completion, FinishReason, Part, Sampling, Usage, before_stop

log = logging.getLogger(__name__)

_FINISH_REASONS: dict[str | None, FinishReason] = {
    **dict.fromkeys(("length", "limit", "token_limit", "incomplete", "max_tokens", "max_new_tokens"), "length"),
    **dict.fromkeys(("max_output_tokens", "max_completion_tokens", "max_length", "model_length"), "length"),
    **dict.fromkeys(("context_length_exceeded", "model_context_window_exceeded"), "length"),
    **dict.fromkeys(("stop_sequence", "stop_string", "stop_str", "stop_word", "stop_words"), "stop"),
    **dict.fromkeys(("eos", "eos_token", "end_turn", "end_of_turn", "end_of_text", "endoftext"), "eos"),
    **dict.fromkeys(("complete", "completed"), "eos"),
}
"""Finish reasons of OpenAI, TGI, Anthropic, Cohere, Gemini, Mistral and Bedrock, in lower case, without `stop`, which
may be a stop string or the model's own end."""
_MIN_LOGPROB = -9999.0
"""OpenAI's logprob for very unlikely tokens. It replaces minus infinity, which other servers return."""


def completions_of(
    reply: ServerReply, sampling: Sampling, logprobs: bool, used: Usage, stops_sent: bool = True, prefix: str = ""
) -> list[Completion]:
    """Return one completion per choice, in order: its thinking, if there is any, and its text.

    The first one has the usage of the prompt. New tokens are split evenly if the server reports only a total. `prefix`
    is the assistant message to continue, which is removed if the server repeated it.

    Raises:
        RequestError: Requested logprobs are missing, or the reply has no text: it was filtered, or is a tool call.
    """
    choices = list(reply.choices)
    if all(choice.index is not None for choice in choices):
        choices.sort(key=lambda choice: choice.index or 0)
    if all(choice.problem for choice in choices):
        raise no_text(choices[0])
    new = _shares(choices, used.new_tokens)
    samples = []
    for i, choice in enumerate(choices):
        whole, thinking = choice.apart(sampling.keep_stop)
        if prefix:
            whole = _without(prefix, whole)
        text, reason = _ended(choice, whole, sampling, stops_sent)
        if choice.problem:
            log.warning('one of %d samples gets the finish reason "length": %s', len(choices), choice.problem)
            text, reason = whole, "length"
        usage = replace(used, new_tokens=new[i]) if i == 0 else Usage(new_tokens=new[i], seconds=used.seconds)
        values: tuple[float, ...] | None = choice.token_logprobs
        if not choice.token_ids:
            values = _logprobs(choice, whole, text) if logprobs else None
        total = math.nan if values is None else math.fsum(values)
        exact = Part("exact", text.removeprefix(thinking) if sampling.keep_stop else text, usage.new_tokens)
        parts: tuple[Part, ...] = (Part("thinking", thinking), exact) if thinking else (exact,)
        if sampling.keep_stop and not thinking:  # the search finds the thinking of a piece
            parts = ()
        samples.append(Completion(text, choice.token_ids, total, reason, usage, parts=parts, logprobs=values or ()))
    return samples


def no_text(choice: Choice) -> RequestError:
    """Return the error for a choice with a problem."""
    return RequestError(f"the server returned no text: {choice.problem}")


def _without(prefix: str, text: str) -> str:
    """Remove a repeated prefix from a text, ignoring whitespace around the prefix."""
    for repeated in (prefix.lstrip(), prefix.strip()):
        if text.lstrip().startswith(repeated):
            return text.lstrip().removeprefix(repeated)
    return text


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
    if choice.finish_reason in _FINISH_REASONS:
        return _FINISH_REASONS[choice.finish_reason]
    stopped = isinstance(choice.stop_reason, str) or (may_be_stopped and not choice.tells_stops)
    return "stop" if stopped else "eos"


def _shares(choices: Sequence[Choice], total: int) -> list[int]:
    """Return the new tokens of each choice."""
    counted = [len(choice.logprobs.drawn) if choice.logprobs is not None else 0 for choice in choices]
    if sum(counted) == total and all(counted):
        return counted
    share, rest = divmod(total, len(choices))
    return [share + (i < rest) for i in range(len(choices))]


def _logprobs(choice: Choice, whole: str, text: str) -> tuple[float, ...]:
    """Return the logprobs of the tokens of `text`, a prefix of the `whole` text. Raises RequestError without them."""
    drawn = choice.logprobs.drawn if choice.logprobs is not None else ()
    values = [max(value, _MIN_LOGPROB) for _, value in drawn if value is not None and not math.isnan(value)]
    if len(values) < len(drawn) or (not values and (whole or choice.logprobs is None)):
        raise RequestError("the server returned no log-probabilities: remove the option logprobs or use another server")
    if len(text) >= len(whole):
        return tuple(values)
    length, count = 0, 0
    while count < len(drawn) and length < len(text):
        length += len(drawn[count][0] or "")
        count += 1
    return tuple(values[:count])
