"""Thinking with a budget: every text ends in an answer, however long its thinking is.

Thinking that spends its tokens is closed with the model's own tag, and the answer is decoded after it (budget forcing;
s1, arXiv 2501.19393, section 3.1). With `Sampling.settle`, thinking is also closed once its answer is settled: at the
end of each paragraph, a branch closes the thinking and decodes the beginning of the answer, greedily (compare DEER,
arXiv 2504.15895, and FastCoT, section 4, which answers from the beginning of a rationale). The next paragraph is
decoded in the same steps. The answer is settled once the last `TRIES` tries agree and are sure.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Sequence
from dataclasses import replace

from tot.decoders.engine.sequence import ThinkingPiece
from tot.decoders.methods.programs import Call, Program, Sample, answered, closed, without_tags
from tot.decoders.request import Completion, Part, Usage
from tot.decoders.thinking import CLOSINGS, empty_thinking, end_of, find_thinking

TRIES = 2
"""Consecutive tries that must agree."""
TRY_TOKENS = 16
"""Maximum length of a try in tokens."""
PARAGRAPH = 256
"""Maximum tokens between two tries."""
TRIGGER = "**Final answer:**"
"""The text before a try, after the end of the thinking."""
_OPENING_TOKENS = 8
"""Tokens of a text in which a model opens its thinking."""

_NOTHING = Completion("", (), 0.0, "length", Usage())


def think_then_answer(sample: Sample) -> Program:
    """Decode a text. If it ends in its thinking, close the thinking and decode the answer."""
    sampling = sample.request.sampling
    if sampling.thinking_tokens == 0:
        opening = sample.codec.opening
        end = end_of(sample.awaits, "\n") if sample.awaits else empty_thinking(opening)
        return (yield from closed(sample, _NOTHING, (), end))
    if sampling.settle and sample.thinking_limit and (yield from _thinks(sample)):
        text = yield from _until_settled(sample, sampling.settle)
    else:
        (text,) = yield [sample.rationale()]
    return (yield from answered(sample, text))


def _thinks(sample: Sample) -> Generator[Sequence[Call], list[Completion], bool]:
    """Return whether a text begins with thinking: opened by its prompt, or in its first tokens."""
    if sample.awaits:
        return True
    (begun,) = yield [sample.call((), 0, streamed=None, max_tokens=_OPENING_TOKENS)]
    return bool(find_thinking(begun.text).awaits) or begun.lacks_answer


def _until_settled(sample: Sample, threshold: float) -> Program:
    """Decode the thinking by paragraphs, up to its end or budget, or until its answer is settled."""
    codec = sample.codec
    text = _NOTHING
    awaits, tries = sample.awaits, list[tuple[str, float]]()
    probe: list[Call] = []
    while (left := sample.thinking_limit - len(text.tokens)) > 0:
        stops = ("\n\n", *([awaits] if awaits else CLOSINGS))
        limits = {"max_tokens": min(PARAGRAPH, left), "keep_stop": True, "stop": stops}
        piece = sample.call(text.tokens, len(text.tokens), awaits=awaits, streamed=None, **limits)
        more, *tried = yield [piece, *probe]
        usage = sum((one.usage for one in tried), text.usage + more.usage)
        tries += [_try_of(one) for one in tried]
        if _settled(tries, threshold):
            text = replace(text, usage=usage)
            break
        text = replace(text.then(more), usage=usage, finish_reason=more.finish_reason)
        sample.emit(ThinkingPiece(more.text))
        _, end_at, awaits = find_thinking(codec.decode(text.tokens), sample.awaits)
        if not awaits and end_at:
            return (yield from _rest(sample, text))
        if not awaits or more.finish_reason not in ("stop", "length"):
            break
        end = end_of(awaits, text.text) + TRIGGER
        ids = [*text.tokens, *codec.encode_control(end)]
        probe = [sample.call(ids, 0, awaits=None, streamed=None, temperature=0.0, max_tokens=TRY_TOKENS, stop=("\n",))]
    thinking = find_thinking(codec.decode(text.tokens), sample.awaits).text
    return replace(text, text="", parts=(Part("thinking", thinking, len(text.tokens)), Part("exact", "")))


def _rest(sample: Sample, text: Completion) -> Program:
    """Decode the answer after thinking that the model closed."""
    thinking = find_thinking(sample.codec.decode(text.tokens), sample.awaits).text
    parts = (Part("thinking", thinking, len(text.tokens)),)
    if text.finish_reason in ("eos", "budget", "cancelled"):
        return replace(text, text="", parts=(*parts, Part("exact", "")))
    (answer,) = yield [sample.call(text.tokens, len(text.tokens), awaits=None, max_tokens=sample.limit)]
    answer = without_tags(answer)
    whole = replace(text.then(answer), text=answer.text, parts=(*parts, *answer.parts))
    return replace(whole, finish_reason=answer.finish_reason)


def _try_of(tried: Completion) -> tuple[str, float]:
    """Return the answer of a try, and the geometric mean of its tokens' probabilities."""
    return tried.text.strip(), math.exp(tried.logprob / max(1, len(tried.tokens)))


def _settled(tries: Sequence[tuple[str, float]], threshold: float) -> bool:
    last = tries[-TRIES:]
    agree = len(last) == TRIES and len({answer for answer, _ in last}) == 1 and last[0][0] != ""
    return agree and all(probability >= threshold for _, probability in last)
