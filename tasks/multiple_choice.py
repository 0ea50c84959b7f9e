"""Multiple choice: reason about a question, then choose one of its options (AQuA, CommonsenseQA, StrategyQA).

Rows of the data sets become one text, the question and one option a line, which is read back: so a question can as
well be typed in.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from tot.decoders.errors import TaskError
from tot.task.task import Task
from tot.tasks.gsm8k import GSM8K
from tot.tasks.numbers import complete, last
from tot.tree.thought import State

_LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
_OPTION = re.compile(r"(\(?)([A-Za-z])([).:])\s*+(\S.*)")
_LABELLED = re.compile(r"\s{0,9}\(?([A-Za-z])\s{0,2}[).:]\s*+")

# A label in a model's text: in brackets, or before a pause. A capital may also stand bare, but A and I are words too:
# they need a reason or a number after them. All repeats are bounded, so that the patterns are linear.
_MARKED = (
    r"(?:\(([A-Za-z])\)|([A-Za-z])\)"
    r"|([A-Za-z])(?=[ \t*_\"'`\]}$]{0,9}(?:[.,:;!?](?![0-9])|\n|\Z)))"
)
_BARE = (
    r"(?:([AI])(?=[ \t]{1,3}(?:[0-9$]|(?:because|since|as|for|which|so|is)\b))"
    r"|([B-HJ-Z])(?![\w'’(=+*/^]|[ \t]{1,3}[=+*/^<>]))"
)
_AROUND = r"[\s*_\"'`:=$\[{(]{0,9}?"
_ANNOUNCED = re.compile(
    r"\b(?i:(?:answer|ans|choose|pick|select|(?:correct|best|right)[ \t]{1,3}(?:option|choice))\b"
    r"(?:[ \t]{1,3}choice\b)?[ \t*_]{0,4}(?:(?:is|was|(?:would|must|should|will)[ \t]be)\b)?"
    r"[ \t:–-]{0,4}(?:(?:option|choice|letter)\b)?)"
    rf"{_AROUND}(?<![\w'’])(?:{_MARKED}|{_BARE})"
)
# Weaker, since a text may say it of other options in passing.
_CALLED_RIGHT = re.compile(
    r"(?<![\w'’])([A-Z])\)?[ \t]{1,3}is[ \t]{1,3}(?:the[ \t]{1,3})?(?:correct|right|answer|best)\b"
    rf"|\b(?i:it(?:[ \t]is|['’]s)|must[ \t]be|go[ \t]with)[ \t]{{1,3}}{_AROUND}(?<![\w'’])(?:{_MARKED}|{_BARE})"
)
_LAST_LINE = re.compile(rf"\n{_AROUND}{_MARKED}\s{{0,9}}\Z")
_OPENING = re.compile(rf"{_AROUND}{_MARKED}")
_NAMED = re.compile(rf"\b(?:[Oo]ption|[Cc]hoice)[ \t*_(]{{1,4}}(?:{_MARKED}|{_BARE})|\(([A-Z])\)")
_BOXED = re.compile(r"\\boxed\s{0,9}\{\s{0,9}(?:\\text\w{0,9}\s{0,9}\{)?\s{0,9}\(?([A-Z])(?![\w'’])")
_LATEX = re.compile(r"\\(?:boxed|text|textbf|mathrm|mathbf)\b")


class MultipleChoice(Task):
    """Input: a question, then its options, one a line: "A) 15". Output: the label of an option, "A".

    A thought is one line of reasoning; its value, from 1 to 10, is how sound it is. T = 2: several rationales, then the
    choice after the best. Score: 1 where the labels are equal, else 0.
    """

    name = "multiple_choice"
    thought = ("rationale",)
    depth = 2
    search = "bfs:thoughts=4,breadth=1"
    triggers: ClassVar[Mapping[str, str]] = {
        "chain": "\nAnswer:",
        "explain": "\nFrom 1 (unsound) to 10 (sound), the number is:",
    }
    sampling: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "rationale": {"max_tokens": 128, "stop": ("\n",)},
        "propose": {"max_tokens": 320, "stop": ("\n\n",)},
        "vote": {"max_tokens": 8, "stop": ("\n",)},
        "explain": {"max_tokens": 128, "stop": ("\n\n",)},
        "chain": {"max_tokens": 192, "stop": ("\n\n", "\nQuestion:")},
        "answer": {"max_tokens": 8, "stop": ("\n",)},
    }

    chat: ClassVar[Mapping[str, Any]] = GSM8K.chat

    def start(self, question: str) -> State:
        """The question in canonical text. Raises TaskError where it has fewer than two options, or a label twice."""
        return State(question=_text(*_parts(super().start(question).question)))

    def question_of(self, row: Mapping[str, Any]) -> str:
        """The canonical text of a row in the form of AQuA, CommonsenseQA (as published, or as on the hub), StrategyQA.

        A row whose `question` has its options in it already is taken as it is. Labels that are not letters (1, 2, ...)
        become letters, by place. Raises TaskError for any other row.
        """
        stem, given = _stem(row), _options_of(row)
        return stem if given is None else _text(stem, _lettered(given))

    def reference_of(self, row: Mapping[str, Any]) -> str:
        """The label of the right option. Raises TaskError where the row names none."""
        right = next(
            (row[name] for name in ("correct", "answerKey", "answer") if row.get(name) not in (None, "")), None
        )
        if isinstance(right, bool):
            return "A" if right else "B"
        given = _options_of(row)
        if given is None:
            labels = {label: label for label in options(_stem(row))}
        else:
            labels = dict(zip((label.upper() for label, _ in given), _lettered(given), strict=True))
        right = labels.get(self.canonical(right))
        if right is None:
            raise TaskError(
                f"the row {str(dict(row))[:80]!r} does not name its right option: give its label as `correct`, "
                "`answerKey` or `answer`"
            )
        return right

    def variables(self, state: State) -> dict[str, Any]:
        demonstrations = self.data("demonstrations")
        return {
            **super().variables(state),
            "demonstrations": [{**row, "question": self.question_of(row)} for row in demonstrations],
        }

    def parse_answer(self, text: str) -> str | None:
        """The label boxed last, else announced last ("the answer is (B)"), else called right last, else one that ends
        or opens the text, else the last.

        None where there is none: the text of an option alone is not read, for want of the question.
        """
        if announced := _announced(text):
            return announced
        text = _LATEX.sub("", text).strip()
        end = _LAST_LINE.search(text, max(0, len(text) - 20))
        for found in (last(_CALLED_RIGHT.finditer(text)), end, _OPENING.match(text), last(_NAMED.finditer(text))):
            if found:
                return _label(found)
        return None

    def parse_truncated(self, text: str) -> str | None:
        """Only a label that is boxed or announced counts."""
        return _announced(text, complete(text))

    def is_answered(self, message: str) -> bool:
        return _BOXED.search(message, 0, message.rfind("\n") + 1) is not None  # its last line may go on

    def choices(self, state: State) -> tuple[str, ...]:
        """The labels of the question's options."""
        return tuple(options(state.question))

    def canonical(self, answer: Any) -> str:
        return str(answer).strip(" \t\n().:").upper()


def _announced(text: str, sentences: str | None = None) -> str | None:
    """The label that a text boxes last, else the one that it, or its whole `sentences`, announce last."""
    if boxed := last(_BOXED.finditer(text)):
        return boxed[1]
    found = last(_ANNOUNCED.finditer(_LATEX.sub("", text if sentences is None else sentences).strip()))
    return _label(found) if found else None


def _label(found: re.Match[str]) -> str:
    return next(label for label in found.groups() if label).upper()


def options(question: str) -> dict[str, str]:
    """The options of a question in canonical text, by label. Raises TaskError as `MultipleChoice.start` does."""
    return _parts(question)[1]


def _parts(question: str) -> tuple[str, dict[str, str]]:
    """The question before its options, and these. Options are the last lines that are all marked in the same way."""
    lines = question.strip().splitlines()
    found: list[tuple[str, str]] = []
    marks = None
    while lines and not (len(found) > 1 and found[-1][0] == "A"):  # above A stands the question
        option = _OPTION.fullmatch(lines[-1].strip())
        if option is None or marks not in (None, (option[1], option[3])):
            break
        marks = (option[1], option[3])
        found.append((option[2].upper(), " ".join(option[4].split())))
        lines.pop()
    found.reverse()
    stem = "\n".join(lines).strip()
    times = Counter(label for label, _ in found)
    how = "write the question, then two or more options, one a line, such as 'A) 15' and 'B) 16'"
    if len(found) < 2:
        raise TaskError(f"the question {question[:80]!r} ends in {len(found)} options: {how}")
    repeated = next((label for label, count in times.items() if count > 1), None)
    if repeated is not None:
        raise TaskError(f"the question {stem[:80]!r} has several options {repeated}: {how}")
    if not stem:
        raise TaskError(f"there is no question before the option {found[0][0]}) {found[0][1][:80]!r}: {how}")
    return stem, dict(found)


def _text(stem: str, given: Mapping[str, str]) -> str:
    if empty := [label for label, text in given.items() if not text.strip()]:
        raise TaskError(f"the question {stem[:80]!r} has an empty option {empty[0]}: give each option a text")
    return "\n".join([stem.strip(), *(f"{label}) {' '.join(text.split())}" for label, text in given.items())])


def _stem(row: Mapping[str, Any]) -> str:
    question = row.get("question")
    if isinstance(question, Mapping):
        question = question.get("stem")
    if not isinstance(question, str) or not question.strip():
        raise TaskError(f"the row {str(dict(row))[:80]!r} has no question: give its text as `question`")
    return question


def _options_of(row: Mapping[str, Any]) -> list[tuple[str, str]] | None:
    """(label, text) of each option of a row, labels as given; None where they stand in the question."""
    question = row.get("question")
    choices = row.get("options", row.get("choices"))
    if choices is None and isinstance(question, Mapping):
        choices = question.get("choices")
    if isinstance(choices, Mapping) and {"label", "text"} <= choices.keys():
        pairs = [{"label": label, "text": text} for label, text in zip(choices["label"], choices["text"], strict=False)]
        return _options_of({"choices": pairs})
    if isinstance(choices, Sequence) and not isinstance(choices, str):
        if len(choices) > len(_LETTERS):
            raise TaskError(f"the row has {len(choices)} options: give at most {len(_LETTERS)}")
        if all(isinstance(choice, Mapping) and {"label", "text"} <= choice.keys() for choice in choices):
            return [(str(choice["label"]).strip(), _option_text(choice["text"])) for choice in choices]
        texts = [_option_text(choice) for choice in choices]
        labelled = [_LABELLED.match(text) for text in texts]
        labels = [found[1] for found in labelled if found]
        if len(set(labels)) == len(texts):
            return [(found[1], text[found.end() :]) for found, text in zip(labelled, texts, strict=True) if found]
        return list(zip(_LETTERS, texts, strict=False))
    if choices is None and isinstance(row.get("answer"), bool):
        return [("A", "Yes"), ("B", "No")]
    if choices is None:
        return None
    raise TaskError(
        f"the options {str(choices)[:80]!r} are in no known form: give a list of texts, or of labels and texts"
    )


def _option_text(option: Any) -> str:
    if isinstance(option, Mapping | list | tuple):
        raise TaskError(f"the option {option!r:.60} is not text: give each option a text")
    return "" if option is None or option != option else str(option)  # NaN is a missing cell


def _lettered(given: Sequence[tuple[str, str]]) -> dict[str, str]:
    letters = [label.upper() for label, _ in given]
    if len(set(letters)) < len(given) or not all(len(label) == 1 and label in _LETTERS for label in letters):
        letters = list(_LETTERS[: len(given)])
    return {letter: text for letter, (_, text) in zip(letters, given, strict=True)}
