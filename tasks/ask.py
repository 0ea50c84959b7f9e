"""Any question: the answers of several samples vote, or the text that is closest to all others is the answer."""

from __future__ import annotations

import math
import re
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, ClassVar

from rapidfuzz import fuzz

from tot.task.task import Task, text_of
from tot.tasks.answer_words import COMMON, is_date, is_number, is_unit, same_date, words
from tot.tasks.formulas import boxed
from tot.tasks.number_answers import numbers_said
from tot.tasks.sentences import split

_MOST_WORDS = 8
"""Maximum length of a short answer in words, without the words of the question."""
_MOST_SENTENCES = 3
"""Longer texts have a short answer only in a box or a conclusion with a number."""
_SIMILAR = 0.8
"""Texts that are at least this similar share a ballot."""
_COMPARED = 4000
"""Maximum length of a compared text in characters."""
_CONCLUSION = re.compile(r"\W*(?:so|thus|hence|therefore|in conclusion|(?:the )?(?:final )?answer)\b", re.IGNORECASE)
_CLAUSES = re.compile(
    r"([;()]|:(?=\s)|,(?=\s(?!\d))|\b(?:but|however|although|though)\b|(?<=[^\W\d_]{2})\s[-–—]+\s)", re.IGNORECASE
)
_DENIES = re.compile(
    r"\b(?:is|are|was|were|be|been|do|does|did|has|have|had|can|could|would|should|will|may|might|must)\s(?:\w+\s)?"
    r"not\b(?!\s(?:only|just|merely)\b|.*\buntil\b)|n['’]t\b(?!.*\buntil\b)|\b(?:cannot|never|neither|unlikely|hardly"
    r"|no longer|false|wrong|incorrect|(?<!no )(?<!without )(?<!without a )doubt)\b",
    re.IGNORECASE,
)
"""A clause that denies an answer."""
_CONTRAST = re.compile(
    r"\b(?:not(?!\s(?:only|just|merely|sure|certain)\b|.*\buntil\b)|nor|rather than|instead of|unlike|except"
    r"|other than)\b.*",
    re.IGNORECASE | re.DOTALL,
)
"""The end of a clause that denies another answer: "1984 and not 1985"."""
_ALTERNATIVES = re.compile(
    r"(?<!,)\sor\s(?!(?:not|so|more|less|fewer|later|earlier|above|below|thereabouts)\b)|,[^,]*,\sor\s|,\sor\s+\d",
    re.IGNORECASE,
)
"""A choice of answers, but not another name: "table salt, or sodium chloride"."""
_VERSION = re.compile(r"\b(?:version|release)s?\b", re.IGNORECASE)


class Ask(Task):
    """Input: any question. Output: the text of an answer.

    Short answers vote: they are compared in their normal form (`tot.tasks.answer_words`), without the words of the
    question. A number without a unit votes with the unit that all others give it. Of longer texts, the one with the
    highest mean similarity to all samples is elected (minimum Bayes risk, Bertsch et al., 2023). Score: 1 if the answer
    equals the reference, or its sentence contains it and does not deny it, else 0.
    """

    name = "ask"
    thought = ("step",)
    depth = 2
    search = "cot"
    sampling: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        template: {"max_tokens": 256, "stop": ("\nQuestion:",)} for template in ("step", "chain", "answer")
    }
    chat: ClassVar[Mapping[str, Any]] = {
        "depth": 16,
        "labels": {"Yes": 1.0, "No": 0.0},
        "sampling": {template: {"max_tokens": 1024} for template in ("step", "chain", "answer")},
        "generator": "continue",
        "evaluator": "logprob:window=16",
        "filters": {"top_p": 0.8, "top_k": 20},
    }

    def reference_of(self, row: Mapping[str, Any]) -> list[str]:
        """Return the row's right answers: `answer` is a text or a list of texts."""
        answers = row["answer"] if isinstance(row["answer"], list) else [row["answer"]]
        return [text_of(answer, "answer") for answer in answers]

    def canonical(self, answer: Any) -> Hashable:
        return short_answer("", str(answer)) or _plain(str(answer))

    def elect(self, question: str, answers: Sequence[Any], weights: Sequence[float]) -> tuple[Sequence[Hashable], int]:
        """Return a key for each answer, which similar answers share, and the index of the elected answer."""
        texts = [str(answer) for answer in answers]
        short = _with_units([short_answer(question, text) for text in texts])
        plain = [_plain(text)[:_COMPARED] for text in texts]
        size = range(len(texts))

        def similarity(i: int, j: int) -> float:
            if short[i] or short[j]:
                return float(short[i] == short[j])
            if i == j:  # no more than to others: models write loops with high probability
                return max((similarity(i, k) for k in size if k != i), default=1.0)
            return fuzz.token_sort_ratio(plain[i], plain[j]) / 100

        similar = [[similarity(i, j) for j in size] for i in size]
        # Bertsch et al., 2023: the utility of a text is its mean similarity to the samples.
        utility = [math.fsum(weights[j] * similar[i][j] for j in size) for i in size]
        order = sorted(size, key=lambda i: (-utility[i], -weights[i]))
        keys: dict[int, str] = {}
        for i in order:
            if i not in keys:
                group = [j for j in size if j == i or similar[i][j] >= _SIMILAR]
                keys = dict.fromkeys(group, short[i] or plain[i]) | keys
        return [keys[i] for i in size], order[0]

    def score(self, answer: str | None, reference: Any) -> float:
        """Return 1 if a short answer equals or contains a right answer; a number must be its last one."""
        references = reference if isinstance(reference, list) else [reference]
        return float(answer is not None and any(_is_right(answer, str(right)) for right in references))


def short_answer(question: str, text: str) -> str | None:
    """Return a text's short answer in normal form; None if the text has no short answer.

    It is the text's last box, or its sentence with the answer without the words of the question: a yes or no, a number,
    or the words that remain.
    """
    exact = _VERSION.search(question) is not None
    said = boxed(text) or _sentence(text)
    found = words(_claimed(said), exact) or words(said, exact)
    if found[:1] in (["yes"], ["no"]):
        return found[0]
    asked = {*words(question), *COMMON}
    rest = [word for word in found if word not in asked] or [word for word in found if word not in COMMON] or found
    if rest and [word for word in rest if is_number(word)] == rest[:1]:  # 5 km, 6 sides
        return " ".join([rest[0], *filter(is_unit, rest[1:2])])
    return " ".join(rest) if 0 < len(rest) <= _MOST_WORDS else None


def _with_units(short: Sequence[str | None]) -> list[str | None]:
    """Add to each number without a unit the unit of the others with that number, if they agree."""
    units: dict[str, set[str]] = {}
    for one in filter(None, short):
        number, space, unit = one.partition(" ")
        if space and is_unit(unit):
            units.setdefault(number, set()).add(one)
    return [next(iter(units[one])) if one and len(units.get(one, ())) == 1 else one for one in short]


def _sentence(text: str) -> str:
    """Return the sentence with the answer; empty if the text is long and has no result.

    It is the last one that begins with a conclusion such as "so", otherwise the first. A longer text has a result if
    its conclusion has a number.
    """
    sentences = split(text[-_COMPARED:])
    sentences = [one for one in sentences if not one.endswith("?")] or sentences  # Lyon? No, Paris.
    long = len(sentences) > _MOST_SENTENCES
    results = [one for one in sentences if _CONCLUSION.match(one) and (not long or numbers_said(one))]
    return results[-1] if results else "" if long or not sentences else sentences[0]


def _claimed(text: str) -> str:
    """Return a sentence without its clauses, and ends of clauses, that deny something."""
    clauses = _CLAUSES.split(text)
    kept = (
        _CONTRAST.sub("", clause) + mark
        for clause, mark in zip(clauses[::2], [*clauses[1::2], ""], strict=True)
        if not _DENIES.search(clause)
    )
    return "".join(kept)


def _is_right(answer: str, right: str) -> bool:
    wanted = words(right)
    if not wanted or words(answer) == wanted:
        return bool(wanted)
    said = boxed(answer) or _sentence(answer)
    if wanted in (["yes"], ["no"]):
        return words(said)[:1] == wanted
    if not (_DENIES.search(right) or _CONTRAST.search(right)):
        said = _claimed(said)
    if "or" not in wanted and _ALTERNATIVES.search(said):
        return False
    found = words(said)
    number, *unit = wanted
    if is_number(number) and (not unit or is_unit(*unit[:1])) and len(unit) < 2:
        values = [i for i, word in enumerate(found) if is_number(word) or is_date(word)]
        following = found[values[-1] + 1 :][:1] if values else []
        same = bool(values) and (
            found[values[-1]] == number or (not unit and found[values[-1]].startswith(f"{number}-"))
        )
        return same and (not unit or following == unit or not any(map(is_unit, following)))
    if [date for date in wanted if is_date(date)] == wanted:
        return any(is_date(word) and same_date(word, number) for word in found)
    return f" {' '.join(wanted)} " in f" {' '.join(found)} "


def _plain(text: str) -> str:
    return " ".join(words(text))
