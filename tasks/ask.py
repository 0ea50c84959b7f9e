"""Any question: the answers of several samples vote, or the text that is closest to all others is the answer."""

from __future__ import annotations

import math
import re
import unicodedata
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, ClassVar

from rapidfuzz import fuzz

from tot.task.dataset import text_of
from tot.task.task import Task
from tot.tasks.formulas import boxed
from tot.tasks.numbers import normalize, numbers_said, value_of
from tot.tasks.sentences import split

_MOST_WORDS = 8
"""Maximum length of a short answer in words, without the words of the question."""
_MOST_SENTENCES = 3
"""Longer texts have a short answer only in a box or a conclusion with a number."""
_SIMILAR = 0.8
"""Texts that are at least this similar share a ballot."""
_COMPARED = 4000
"""Maximum length of a compared text in characters."""
_NUMBERS = {
    word: str(i)
    for i, word in enumerate(re.findall(r"\w+", "two three four five six seven eight nine ten eleven twelve"), start=2)
}
"""Number words; "one" is also a pronoun."""
_COMMON = frozenset(
    re.findall(
        r"\w+",
        "i you he she it they we this that these those there is are was were be been am has have had do does did of in "
        "on at to for from by with as and or so thus hence therefore answer called known about approximately exactly "
        "equal equals equivalent",
    )
)
_WORD = re.compile(r"[^\W_]+(?:[.,'’][^\W_]+)*")
_CONCLUSION = re.compile(r"\W*(?:so|thus|hence|therefore|in conclusion|(?:the )?(?:final )?answer)\b", re.IGNORECASE)


class Ask(Task):
    """Input: any question. Output: the text of an answer.

    Short answers vote: they are compared without the words of the question, articles, case and punctuation, and numbers
    by value. Of longer texts, the one with the highest mean similarity to all samples is elected (minimum Bayes risk,
    Bertsch et al., 2023). Score: 1 if the answer equals the reference, or its sentence contains it, else 0.
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
        short = [short_answer(question, text) for text in texts]
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
    words = _words(boxed(text) or _sentence(text))
    if words[:1] in (["yes"], ["no"]):
        return words[0]
    asked = {*_words(question), *_COMMON}
    rest = [word for word in words if word not in asked] or [word for word in words if word not in _COMMON] or words
    if rest and [word for word in rest if _is_number(word)] == rest[:1]:  # 5 km
        return rest[0]
    return " ".join(rest) if 0 < len(rest) <= _MOST_WORDS else None


def _sentence(text: str) -> str:
    """Return the sentence with the answer; empty if the text is long and has no result.

    It is the last one that begins with a conclusion such as "so", otherwise the first. A longer text has a result if
    its conclusion has a number.
    """
    sentences = split(text[-_COMPARED:])
    long = len(sentences) > _MOST_SENTENCES
    results = [one for one in sentences if _CONCLUSION.match(one) and (not long or numbers_said(one))]
    return results[-1] if results else "" if long or not sentences else sentences[0]


def _is_right(answer: str, right: str) -> bool:
    words, wanted = _words(boxed(answer) or _sentence(answer)), _words(right)
    if not wanted or _words(answer) == wanted:
        return bool(wanted)
    if wanted in (["yes"], ["no"]):
        return words[:1] == wanted
    if len(wanted) == 1 and _is_number(wanted[0]):
        return [word for word in words if _is_number(word)][-1:] == wanted
    return f" {' '.join(wanted)} " in f" {' '.join(words)} "


def _plain(text: str) -> str:
    return " ".join(_words(text))


def _words(text: str) -> list[str]:
    """Return the words of a text in lower case, without articles and punctuation, and numbers in digits."""
    words = [_NUMBERS.get(word, word) for word in _WORD.findall(unicodedata.normalize("NFKC", text).lower())]
    return [normalize(word) if _is_number(word) else word for word in words if word not in ("a", "an", "the")]


def _is_number(word: str) -> bool:
    return value_of(word) is not None
