"""Thinking with a budget: every text ends in an answer, however long its thinking is.

Thinking that spends its tokens is closed with the model's own tag, and the answer is decoded after it (budget forcing;
s1, arXiv 2501.19393, section 3.1). With `ThinkingOptions.settle`, thinking is also closed once its answer is settled:
at the end of each paragraph, a branch closes the thinking and decodes the beginning of the answer, greedily (compare
DEER, arXiv 2504.15895, and FastCoT, section 4, which answers from the beginning of a rationale). The next paragraph is
decoded in the same steps. The answer is settled once the last `TRIES` tries agree and are sure, and begins as they did.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Sequence
from dataclasses import replace
from typing import Any

from tot.decoders.engine.sequence import Call, ThinkingPiece
from tot.decoders.engine.text import TextCodec
from tot.decoders.methods.programs import Program, Sample, answered, closed
from tot.decoders.request import Completion, Part, ThinkingOptions, Usage
from tot.decoders.thinking import (
    FINAL,
    Thinking,
    before_tag,
    closings,
    empty_thinking,
    end_of,
    find_thinking,
    forced_end,
)

TRIES = 2
"""Consecutive tries that must agree."""
TRY_TOKENS = 16
"""Maximum length of a try in tokens."""
PARAGRAPH = 256
"""Maximum tokens between two tries."""
TRIGGER = "**Final answer:**"
"""The text before a try and before a settled answer, after the end of the thinking, unless the options have a hint."""
WAIT = "Wait,"
"""The beginning of thinking that continues after the end that the model wrote."""
_OPENING_TOKENS = 16
"""Tokens of a text in which a model opens its thinking."""

_NOTHING = Completion("", (), 0.0, "length", Usage())


def think_then_answer(sample: Sample) -> Program:
    """Decode a text. If it ends in its thinking, close the thinking and decode the answer."""
    sampling, awaits, codec = sample.request.sampling, sample.awaits, sample.codec
    options = sampling.thinking
    if awaits is not None and options.tokens <= sampling.drawn:
        own = codec.has_empty_thinking(codec.options_of(sample.request))
        if end := end_of(awaits, "\n") if awaits else "" if own else empty_thinking(codec.opening):
            return (yield from closed(sample, _NOTHING, (), _before_calls(sample, end)))
    if sampling.keep_stop:
        return (yield from _piece(sample))
    constraint = sample.request.constraint  # on the answer, so the thinking ends before it begins
    in_pieces = constraint is not None or options.settle or options.waits
    if in_pieces and awaits is not None and sample.thinking_limit and (yield from _thinks(sample)):
        return (yield from _in_pieces(sample))
    if constraint is not None:
        has_channels = awaits is not None and codec.message_end is not None  # as in gpt-oss
        end = _before_calls(sample, empty_thinking(codec.opening)) if has_channels else ""
        return (yield from closed(sample, _NOTHING, (), end))
    (text,) = yield [sample.rationale()]
    return (yield from answered(sample, text))


def _piece(sample: Sample) -> Program:
    """Decode a piece of a message, which contains its thinking. A piece that ends the budget closes the thinking."""
    sampling, awaits = sample.request.sampling, sample.awaits or ""
    budget = ThinkingOptions(budget=sampling.drawn + sample.thinking_limit)
    (text,) = yield [sample.call((), 0, thinking=budget, max_tokens=sampling.max_tokens)]
    spent = sampling.drawn + len(text.tokens) >= sampling.thinking.tokens
    if not find_thinking(text.text, awaits).awaits or not (spent or text.finish_reason in ("eos", "repetition")):
        return text
    kept, end = forced_end(text.text, awaits) or (text.text, "")
    sample.emit(end)
    parts = (Part("thinking", kept, len(text.tokens)), Part("closing", end))
    return replace(text, text=kept + end, parts=parts, finish_reason="stop")


def _thinks(sample: Sample) -> Generator[Sequence[Call], list[Completion], bool]:
    """Return whether a text begins with thinking: opened by its prompt, or in its first tokens."""
    if sample.awaits:
        return True
    (begun,) = yield [sample.call((), 0, streamed=None, max_tokens=_OPENING_TOKENS)]
    return bool(find_thinking(begun.text).awaits) or begun.lacks_answer


def _in_pieces(sample: Sample) -> Program:
    """Decode the thinking up to its end or budget, or until its answer is settled, and then the answer."""
    codec, options = sample.codec, sample.request.sampling.thinking
    text, shown, waits = _NOTHING, 0, options.waits
    fed: list[int] = []
    """All tokens, of which `text` has the sampled ones."""
    tries, probe, settled = list[tuple[str, float]](), list[Call](), False
    begun = sample.awaits or ""
    found = Thinking("", 0, begun)
    while (left := sample.thinking_limit - len(text.tokens)) > 0:
        stops = (*["\n\n"] * bool(options.settle), *([found.awaits] if found.awaits else closings()))
        limits: dict[str, Any] = {"max_tokens": min(PARAGRAPH, left), "keep_stop": True, "stop": stops}
        more, *tried = yield [sample.call(fed, len(text.tokens), awaits=found.awaits, streamed=None, **limits), *probe]
        usage = sum((one.usage for one in tried), text.usage + more.usage)
        tries += [_try_of(one) for one in tried]
        sample.tried += sum(len(one.tokens) for one in tried)
        if settled := _settled(tries, options.settle):
            sample.tried += len(more.tokens)
            text = replace(text, usage=usage)
            break
        text = replace(text.then(more), usage=usage, finish_reason=more.finish_reason)
        fed += [token for token in more.tokens if token not in codec.end_ids]
        found = find_thinking(codec.decode(fed), begun)
        if waits and not found.awaits and more.finish_reason == "stop":
            waits -= 1
            fed = [*_unclosed(codec, fed, found.end), *codec.encode(f"\n\n{WAIT}")]
            found = find_thinking(codec.decode(fed), begun)
        sample.emit(ThinkingPiece(found.text[shown:]))
        shown = len(found.text)
        if more.finish_reason not in ("stop", "length") or not found.awaits:
            break
        probe = [_try_call(sample, fed, found)] if options.settle else []
    text = replace(text, parts=(Part("thinking", before_tag(found.text, found.awaits), len(text.tokens)),))
    answers = found.awaits or sample.request.constraint
    if text.finish_reason in ("budget", "cancelled") or (text.finish_reason == "eos" and not answers):
        return replace(text, text="", parts=(*text.parts, Part("exact", "")))
    written = codec.decode(fed)
    kept, end = forced_end(written, begun) or (written, "")
    if sample.request.constraint is not None and fed[-1:] == [codec.message_end]:
        end = empty_thinking(codec.opening, follows=True)
    hint = _hint(sample) if settled else None
    return (yield from closed(sample, text, codec.beginning(fed, kept), _before_calls(sample, end), hint))


def _hint(sample: Sample) -> str:
    """Return the text before a try, and before the answer that is settled."""
    return "" if sample.request.constraint else sample.request.sampling.thinking.hint or TRIGGER


def _before_calls(sample: Sample, end: str) -> str:
    """Return the end of the thinking without the beginning of an answer, which may be a call on another channel."""
    return end.removesuffix(FINAL) if sample.request.tools else end


def _unclosed(codec: TextCodec, tokens: Sequence[int], end: int) -> list[int]:
    """Return the tokens of a text up to the tag that closes its thinking, which ends before character `end`."""
    text = codec.decode(tokens)[:end]
    return codec.beginning(tokens, text[: max(text.rfind(tag) for tag in closings())].rstrip())


def _try_call(sample: Sample, tokens: Sequence[int], found: Thinking) -> Call:
    """Return the call for a try of the answer after these tokens of thinking."""
    codec, hint = sample.codec, _hint(sample)
    ids = [*tokens, *codec.encode_control(end_of(found.awaits, found.text)), *(codec.encode(hint) if hint else [])]
    limits: dict[str, Any] = {"temperature": 0.0, "max_tokens": TRY_TOKENS, "stop": ("\n",)}
    return sample.call(ids, 0, awaits=None, streamed=None, **limits)


def _try_of(tried: Completion) -> tuple[str, float]:
    """Return the answer of a try, and the geometric mean of its tokens' probabilities."""
    return tried.text.strip(), math.exp(tried.logprob / max(1, len(tried.tokens)))


def _settled(tries: Sequence[tuple[str, float]], threshold: float) -> bool:
    last = tries[-TRIES:]
    agree = len(last) == TRIES and len({answer for answer, _ in last}) == 1 and last[0][0] != ""
    return agree and all(probability >= threshold for _, probability in last)
