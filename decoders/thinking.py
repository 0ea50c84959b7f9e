"""Find the thinking of a model, which comes before the answer in its text. No other file searches for it.

Thinking stands between two tags at the beginning of a text; a tag in the answer is text. The chat template may open the
thinking, so that the text has only the closing tag. `find_thinking` reads a text up to its answer. In a finished text
whose prompt is unknown, `split` also accepts a closing tag alone.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import replace
from functools import cache
from itertools import product
from typing import NamedTuple

from tot.decoders.request import EFFORTS, Completion, Part, ThinkingOptions

HARMONY = "<|channel|>"
"""A control token of gpt-oss's format, in which a reply is a sequence of messages on channels."""
FINAL = "<|channel|>final<|message|>"
"""The beginning of its answer."""
MESSAGE_END = "<|end|>"
"""Its control token that ends a message: of the thinking, or the last one of a reply."""
_START = "<|start|>assistant"
_TAGS = {
    "<think>": "</think>",  # DeepSeek R1, Qwen3, GLM, SmolLM3, Granite 3.3, ...
    "<thinking>": "</thinking>",
    "<thought>": "</thought>",  # EXAONE Deep
    "<reasoning>": "</reasoning>",
    "<seed:think>": "</seed:think>",
    "<longcat_think>": "</longcat_think>",
    "[THINK]": "[/THINK]",  # Magistral
    "◁think▷": "◁/think▷",  # Kimi-VL
    "<|begin_of_thought|>": "<|end_of_thought|>",  # OpenThinker
    "<|START_THINKING|>": "<|END_THINKING|>",  # Command A Reasoning
}
"""The closing tag of each opening tag."""
_OPENED_ONLY = {
    "<|inner_prefix|>": "<|inner_suffix|>",  # Apertus
    "<|channel>thought": "<channel|>",  # Gemma 4
    "Here is my thought process:": "Here is my response:",  # Granite 3.2
    **{
        f"{start}<|channel|>{channel}<|message|>": MESSAGE_END  # gpt-oss
        for start, channel in product(("", _START), ("analysis", "commentary"))
    },
}
"""Tags whose closing tag alone does not mean thinking."""
_CLOSES = _TAGS | _OPENED_ONLY
_ANSWERS = (FINAL, _START + FINAL, "<response>", "<|begin_of_solution|>", "<|START_RESPONSE|>")
"""Tags that begin an answer."""
_ANSWER = re.compile(r"\s*(?:" + "|".join(map(re.escape, _ANSWERS)) + ")")
_ANSWER_END = re.compile(r"\s*(?:<\|return\|>|<\|end\|>|</response>|<\|end_of_solution\|>|<\|END_RESPONSE\|>)\s*$")
_UNMARKED = re.compile(r"\s*analysis(?:(.*?)assistantfinal|([A-Z][\w']*[,.?!:]? [\w\\].*))", re.DOTALL)
"""gpt-oss without its control tokens: up to the answer, or cut in the thinking."""
_QUOTES = "'\"`"


def add_tags(opening: str, closing: str) -> None:
    """Read text between these tags as thinking, too, in all models of this process."""
    _CLOSES[opening] = closing
    _opening.cache_clear()


@cache
def _opening() -> re.Pattern[str]:
    return re.compile(r"\s*(" + "|".join(map(re.escape, _CLOSES)) + ")")


def openings() -> tuple[str, ...]:
    """Return the tags that open thinking."""
    return tuple(_CLOSES)


def closings() -> tuple[str, ...]:
    """Return the tags that close thinking."""
    return tuple(dict.fromkeys(_CLOSES.values()))


class Thinking(NamedTuple):
    """The thinking at the beginning of a text."""

    text: str
    """The thinking without its tags."""
    end: int
    """Where the answer begins."""
    awaits: str
    """The closing tag, if the text ends inside the thinking; otherwise empty."""


def find_thinking(text: str, awaits: str = "") -> Thinking:
    """Return the thinking at the beginning of a text. `awaits`: the closing tag, if the prompt opened the thinking."""
    found, at = "", 0
    while True:
        if not awaits:
            opening = _opening().match(text, at)
            if opening is None:
                break
            awaits, at = _CLOSES[opening[1]], opening.end()
        end = _find(text, awaits, at)
        if end < 0:
            return Thinking(found + text[at:], len(text), awaits)
        found, at, awaits = found + text[at:end], end + len(awaits), ""
    if (answer := _ANSWER.match(text, at)) is not None and (at or HARMONY in answer[0]):
        at = answer.end()
    return Thinking(found, at + len(text[at:]) - len(text[at:].lstrip()) if at else 0, "")


def split(text: str, awaits: str = "") -> tuple[str, str]:
    """Return the thinking and the answer of a finished text; the answer is empty if the thinking is not closed."""
    found = find_thinking(text, awaits)
    if cut_in_tag(rest := text[found.end :]):
        return found.text or rest, ""
    if found.awaits or found.end:
        return found.text, answer_of(text, found.end)
    if (unmarked := _UNMARKED.match(text)) is not None:
        return unmarked[unmarked.lastindex or 1], text[unmarked.end() :].lstrip()
    for opening, closing in _TAGS.items():
        end = _find(text, closing, 0)
        rest = text[end + len(closing) :]
        if end >= 0 and opening not in text[:end] and not re.match(r"[.,;:!?)](?:\s|$)", rest):
            return text[:end], rest.lstrip()
    return "", text


def answer_of(text: str, begin: int) -> str:
    """Return the answer that begins at `begin`, without a tag that closes it."""
    return _ANSWER_END.sub("", text[begin:]) if begin and text[:begin].rstrip().endswith(_ANSWERS) else text[begin:]


def forced_end(text: str, awaits: str = "") -> tuple[str, str] | None:
    """Return the part of a text that was cut in its thinking to keep, and the end to append, after which it answers.

    Returns None if the thinking has ended. `awaits` is as in `find_thinking`.
    """
    found = find_thinking(text, awaits)
    if found.awaits:
        kept = before_tag(text, found.awaits)
        return kept, end_of(found.awaits, kept)
    kept, rest = text[: found.end], text[found.end :].strip()
    if not cut_in_tag(rest):
        return None
    tags = (*_ANSWERS, *_CLOSES) if kept else openings()
    tag = next(tag for tag in (*tags, *_ANSWERS) if tag.startswith(rest))
    return kept, tag if tag in _ANSWERS else empty_thinking(tag, bool(kept))


def end_of(tag: str, written: str) -> str:
    """Return the closing tag with the text around it that begins an answer, after the text written so far."""
    if tag == MESSAGE_END:
        return tag + _START + FINAL
    if not tag.startswith("</"):
        return tag
    return ("" if written.endswith("\n") else "\n") + tag + "\n\n"


def empty_thinking(opening: str, follows: bool = False) -> str:
    """Return thinking without text, which begins an answer; for gpt-oss the beginning of an answer.

    Empty without a tag.
    """
    if HARMONY in opening:
        return _START + FINAL if follows else FINAL
    return opening and opening + end_of(_CLOSES[opening], opening)


def before_tag(text: str, tag: str) -> str:
    """Return a text without the beginning of a tag at its end."""
    return text[: len(text) - next((k for k in range(len(tag) - 1, 0, -1) if text.endswith(tag[:k])), 0)]


def bare_answer(text: str) -> str:
    """Return the text of an answer after its thinking, without blanks and tags around it."""
    if (tag := _ANSWER.match(text)) is None:
        return text.lstrip()
    return _ANSWER_END.sub("", text[tag.end() :]).lstrip()


def joined(
    text: Completion, end: str, hint: str, answer: Completion, *, exact: bool = False, pieces: bool = False
) -> Completion:
    """Append an answer to a text that was cut in its thinking, which `end` closes; `hint` begins the answer.

    An `exact` answer keeps its blanks. In a message that is decoded in `pieces`, thinking is text.
    """
    *others, last = answer.parts
    written = answer.text if hint or exact or pieces else bare_answer(answer.text)
    thought = [part for part in text.parts if part.kind == "thinking"] + [Part("closing", end)] * bool(end)
    parts = (*thought, *[Part("trigger", hint)] * bool(hint), *others, replace(last, text=written))
    whole = "".join(part.text for part in (parts if pieces else parts[len(thought) :]))
    return replace(text.then(answer), text=whole, parts=parts, finish_reason=answer.finish_reason)


def begins_tag(text: str) -> bool:
    """Return whether a text is blank or the beginning of a tag, so that its next characters are needed."""
    return any(tag.startswith(text.lstrip()) for tag in (*_CLOSES, *_ANSWERS))


def cut_in_tag(text: str) -> bool:
    """Return whether the token limit may have ended a text in its first tag."""
    return text.strip()[:1] in tuple("<[◁") and begins_tag(text)


def left_open(prompt: str) -> str:
    """Return the closing tag of the thinking that a prompt leaves open; empty if it opens none."""
    lead, closing = max(
        (prompt.rfind(opening) - prompt.rfind(closing), closing) for opening, closing in _CLOSES.items()
    )
    return closing if lead > 0 else ""


def control_tags(tokens: Collection[str]) -> set[str]:
    """Return the tags among a model's control tokens, which are part of the text until its thinking is found."""
    tags = {*_CLOSES, *_CLOSES.values(), *_ANSWERS} - {MESSAGE_END}
    begins = {
        token
        for token in tokens
        if len(token) > 3 and any(tag.startswith(token) for tag, end in _OPENED_ONLY.items() if end != MESSAGE_END)
    }  # Gemma 4's tag is a control token and a word
    return (
        begins
        | tags.intersection(tokens)
        | ({HARMONY, "<|start|>", "<|message|>", MESSAGE_END} if HARMONY in tokens else set())
    )


def switches(variables: Collection[str], options: ThinkingOptions) -> dict[str, bool | int | str]:
    """Return the values of a chat template's switches; empty if it has no switch, or the budget is "auto".

    `variables` are the names that the template reads.
    """
    if options.budget == "auto":
        return {}
    tokens = options.tokens
    effort = next((name for name in ("low", "medium") if tokens <= EFFORTS[name]), "high")
    values: dict[str, bool | int | str] = {
        "enable_thinking": tokens > 0,  # Qwen3, GLM, SmolLM3, Hunyuan
        "thinking": tokens > 0,  # Granite, DeepSeek V3.1
        "reasoning_effort": effort,  # gpt-oss
        "thinking_budget": tokens,  # Seed-OSS
    }
    return {name: value for name, value in values.items() if name in variables}


def opening_tag(tokens: Collection[str], template: str) -> str:
    """Return the tag that opens a model's thinking, by its control tokens and its chat template; empty without one."""
    if HARMONY in tokens:
        return f"{HARMONY}analysis<|message|>"
    return next(
        (
            opening
            for opening, closing in _CLOSES.items()
            if closing != MESSAGE_END and any(tag in tokens or tag in template for tag in (opening, closing))
        ),
        "",
    )


def has_tags(template: str) -> bool:
    """Return whether a chat template writes or removes thinking."""
    return any(tag in template for tag in (*_CLOSES, *_TAGS.values(), HARMONY))


def _find(text: str, tag: str, start: int) -> int:
    """Return where a tag is that the text does not quote, or -1."""
    while (at := text.find(tag, start)) > 0 and (quote := text[at - 1]) in _QUOTES:
        after = text[at + len(tag) :][:1]
        if after not in (quote, "") or (not after and text.count(quote, 0, at) % 2 == 0):
            break
        start = at + 1
    return at
