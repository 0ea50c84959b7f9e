"""Multiple choice: reason about a question, then choose one of its options (AQuA, CommonsenseQA, StrategyQA).

Rows of the data sets are converted to one text, the question with one option per line, which the task parses. A user
can type in a question in this format.
"""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from tot.decoders.errors import TaskError
from tot.task.task import Task
from tot.tasks.gsm8k import GSM8K
from tot.tasks.number_answers import complete, last
from tot.tree.thought import State

_CORRECT = ("correct", "answerKey", "answer_idx", "answer", "answer_index")
_LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
_OPTION = re.compile(r"(\(?)([A-Za-z])([).:])\s*+(\S.*)")
_LABELLED = re.compile(r"\s{0,9}\(?([A-Za-z])\s{0,2}[).:]\s*+")

# A label in a model's text: in brackets or before punctuation, or a bare capital. A and I are also words, so they need
# a reason or a number after them. All repeats are bounded, which makes the patterns linear.
_MARKED = (
    r"(?:\(([A-Za-z])\)|([A-Za-z])\)"
    r"|([A-Za-z])(?=[ \t*_\"'`\]}$>]{0,9}(?:[.,:;!?](?![0-9])|\n|\Z)))"
)
_BARE = (
    r"(?:([AI])(?=[ \t]{1,3}(?:[0-9$]|(?:because|since|as|for|which|so|is)\b))"
    r"|([B-HJ-Z])(?![\w'’(=+*/^]|[ \t]{1,3}[=+*/^<>]))"
)
_AROUND = r"[\s*_\"'`:=$\[{(<]{0,9}?"
_START = r"(?:(?<![\w’])(?<!\w')|(?<=[是为选]))"
_TAKEN_BACK = (
    r"(?i:\b(?:wait|actually|correction|on[ \t]second[ \t]thoughts?|scratch[ \t]that|no"
    r"|not[ \t]{1,3}\(?[A-Z]\)?,?[ \t]{1,3}but)"
    r"[,:.!]?[ \t]{1,3}(?:(?:actually|no|so|rather|wait)\b,?[ \t]{1,3}){0,2}"
    r"(?:(?:it|that)(?:['’]s|[ \t](?:is|was|(?:should|must)[ \t]be))[ \t]{1,3})?(?:option[ \t])?)"
    r"[*_\"'`(]{0,3}([A-Z])(?=[ \t*_\"'`)]{0,3}(?:[.!]|\n|\Z|,[ \t]not\b))"
)
_ANNOUNCED = re.compile(
    r"(?i:(?:\b(?:answer|ans|choose|pick|select(?:ed)?|(?:correct|best|right)[ \t]{1,3}(?:option|choice))\b"
    r"|答案[是为选]?|故选)(?:[ \t]{1,3}choice\b)?[ \t*_]{0,4}(?:(?:is|was|(?:would|must|should|will)[ \t]be)\b)?"
    r"[ \t:=–-]{0,4}(?:(?:option|choice|letter)\b)?)"
    rf"{_AROUND}{_START}(?:{_MARKED}|{_BARE})|{_TAKEN_BACK}"
)
# Less reliable: a text may also use these words for other options.
_CALLED_RIGHT = re.compile(
    r"(?<![\w'’])([A-Z])\)?[ \t]{1,3}is[ \t]{1,3}(?:the[ \t]{1,3})?(?:correct|right|answer|best)\b"
    rf"|\b(?i:it(?:[ \t]is|['’]s)|must[ \t]be|go[ \t]with)[ \t]{{1,3}}{_AROUND}{_START}(?:{_MARKED}|{_BARE})"
)
_LAST_LINE = re.compile(rf"\n{_AROUND}{_MARKED}\s{{0,9}}\Z")
_OPENING = re.compile(rf"{_AROUND}{_MARKED}")
_NAMED = re.compile(rf"\b(?:[Oo]ption|[Cc]hoice)[ \t*_(]{{1,4}}(?:{_MARKED}|{_BARE})|\(([A-Z])\)")
_BOXED = re.compile(r"\\boxed\s{0,9}\{\s{0,9}(?:\\text\w{0,9}\s{0,9}\{)?\s{0,9}\(?([A-Z])(?![\w'’])")
_LATEX = re.compile(r"\\(?:(?:boxed|text|textbf|mathrm|mathbf)\b|[()\[\]])")
_TAG = re.compile(r"</?[a-z]{1,20}>")
_SEVERAL = re.compile(r"[ \t)*]{0,4}(?:(?:or|and)[ \t]|/)[ \t]{0,3}\(?[A-Z]\b")


class MultipleChoice(Task):
    """Input: a question, then its options, one per line: "A) 15". Output: the label of an option, "A".

    A thought is one line of reasoning; its value, from 1 to 10, is how sound it is. T = 2: several rationales, then the
    choice after the best. Score: 1 if the labels are equal, else 0.
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

    chat: ClassVar[Mapping[str, Any]] = {
        **GSM8K.chat,
        "triggers": {"chain": triggers["chain"]},
        "search": "auto",
    }

    def start(self, question: str) -> State:
        """Return the root state with the question in canonical text.

        Raises TaskError if the question has fewer than two options or repeats a label.
        """
        return State(question=_text(*_parts(super().start(question).question)))

    def question_of(self, row: Mapping[str, Any]) -> str:
        """Return the canonical text of a row.

        Supported formats are AQuA, CommonsenseQA (original or from the hub), StrategyQA, MMLU, MedQA and OpenBookQA. A
        `question` that contains its options stays unchanged. Labels other than letters (1, 2, ...) become letters, by
        position. Raises TaskError for other formats.
        """
        stem, row_options = _stem(row), _options_of(row)
        return stem if row_options is None else _text(stem, _lettered(row_options))

    def reference_of(self, row: Mapping[str, Any]) -> str:
        """Return the label of the correct option. Raises TaskError if the row does not name it.

        The row has its label, its text, or its index from 0 as an integer.
        """
        right = next((row[name] for name in _CORRECT if row.get(name) not in (None, "")), None)
        if isinstance(right, bool):
            return "A" if right else "B"
        row_options = _options_of(row)
        lettered = options(_stem(row)) if row_options is None else _lettered(row_options)
        labels = [*lettered] if row_options is None else [label.upper() for label, _ in row_options]
        names = dict(zip(labels, lettered, strict=True))
        if (letter := names.get(self.canonical(right))) is not None:
            return letter
        if isinstance(right, int) and 0 <= right < len(lettered):
            return [*lettered][right]
        same = [letter for letter, text in lettered.items() if text.split() == str(right).split()]
        if len(same) != 1:
            raise TaskError(
                f"the row {str(dict(row))[:80]!r} does not name its correct option: give its label as `correct`, "
                "`answerKey` or `answer`"
            )
        return same[0]

    def variables(self, state: State) -> dict[str, Any]:
        demonstrations = self.prompts.data("demonstrations")
        return {
            **super().variables(state),
            "demonstrations": [{**row, "question": self.question_of(row)} for row in demonstrations],
        }

    def parse_answer(self, text: str) -> str | None:
        """Return the label that a text chooses; None if it has no label.

        In order of priority: the last boxed label, the last announced one ("the answer is (B)"), the last one called
        correct, one at the end or the start of the text, the last one. The text of an option without its label is not
        recognized, as the question is not available here.
        """
        text = _plain(text)
        if announced := _announced(text):
            return announced
        text = _LATEX.sub("", text).strip()
        end = _LAST_LINE.search(text, max(0, len(text) - 20))
        for match in (last(_CALLED_RIGHT.finditer(text)), end, _OPENING.match(text), last(_NAMED.finditer(text))):
            if match:
                return _label(match)
        return None

    def parse_truncated(self, text: str) -> str | None:
        """Return only a boxed or announced label."""
        text = _plain(text)
        return _announced(text, complete(text))

    def is_answered(self, message: str) -> bool:
        return _BOXED.search(message, 0, message.rfind("\n") + 1) is not None  # the model may continue the last line

    def choices(self, state: State) -> tuple[str, ...]:
        """Return the labels of the question's options."""
        return tuple(options(state.question))

    def canonical(self, answer: Any) -> str:
        return str(answer).strip(" \t\n().:").upper()


def _announced(text: str, sentences: str | None = None) -> str | None:
    """Return the last boxed label of a text, else the last announced one, in its complete `sentences` if given."""
    if boxed := last(_BOXED.finditer(text)):
        return boxed[1]
    text = _LATEX.sub("", text if sentences is None else sentences).strip()
    match = last(_ANNOUNCED.finditer(text))
    return _label(match) if match and not _SEVERAL.match(text, match.end()) else None


def _plain(text: str) -> str:
    """Return a text without tags and with letters in ASCII: Ⓑ and 【B】 are B."""
    text = unicodedata.normalize("NFKC", text).translate({ord("【"): "[", ord("】"): "]"})
    return _TAG.sub(" ", re.sub(r"(?i)<answer>", "Answer: ", text))


def _label(match: re.Match[str]) -> str:
    return next(label for label in match.groups() if label).upper()


def options(question: str) -> dict[str, str]:
    """Return the options of a question in canonical text, by label. Raises TaskError as `MultipleChoice.start` does."""
    return _parts(question)[1]


def _parts(question: str) -> tuple[str, dict[str, str]]:
    """Split a question into its stem and its options, the last lines that are all marked in the same way."""
    lines = question.strip().splitlines()
    pairs: list[tuple[str, str]] = []
    marks = None
    while lines and not (len(pairs) > 1 and pairs[-1][0] == "A"):  # the stem is above A
        option = _OPTION.fullmatch(lines[-1].strip())
        if option is None or marks not in (None, (option[1], option[3])):
            break
        marks = (option[1], option[3])
        pairs.append((option[2].upper(), " ".join(option[4].split())))
        lines.pop()
    pairs.reverse()
    stem = "\n".join(lines).strip()
    counts = Counter(label for label, _ in pairs)
    how = "write the question, then two or more options, one per line, such as 'A) 15' and 'B) 16'"
    if len(pairs) < 2:
        raise TaskError(f"the question {question[:80]!r} ends in {len(pairs)} options: {how}")
    repeated = next((label for label, count in counts.items() if count > 1), None)
    if repeated is not None:
        raise TaskError(f"the question {stem[:80]!r} has several options {repeated}: {how}")
    if not stem:
        raise TaskError(f"there is no question before the option {pairs[0][0]}) {pairs[0][1][:80]!r}: {how}")
    return stem, dict(pairs)


def _text(stem: str, labelled: Mapping[str, str]) -> str:
    if empty := [label for label, text in labelled.items() if not text.strip()]:
        raise TaskError(f"the question {stem[:80]!r} has an empty option {empty[0]}: give each option a text")
    return "\n".join([stem.strip(), *(f"{label}) {' '.join(text.split())}" for label, text in labelled.items())])


def _stem(row: Mapping[str, Any]) -> str:
    question = row.get("question", row.get("question_stem"))
    if isinstance(question, Mapping):
        question = question.get("stem")
    if not isinstance(question, str) or not question.strip():
        raise TaskError(f"the row {str(dict(row))[:80]!r} has no question: give its text as `question`")
    return question


def _options_of(row: Mapping[str, Any]) -> list[tuple[str, str]] | None:
    """Return (label, text) of each option of a row, with the original labels; None if the question contains them."""
    question = row.get("question")
    choices = row.get("options", row.get("choices"))
    if choices is None and isinstance(question, Mapping):
        choices = question.get("choices")
    if isinstance(choices, Mapping) and {"label", "text"} <= choices.keys():
        pairs = [{"label": label, "text": text} for label, text in zip(choices["label"], choices["text"], strict=False)]
        return _options_of({"choices": pairs})
    if isinstance(choices, Mapping) and choices and all(re.fullmatch("[A-Za-z]", str(label)) for label in choices):
        return [(str(label), _option_text(text)) for label, text in choices.items()]
    if isinstance(choices, Sequence) and not isinstance(choices, str):
        if len(choices) > len(_LETTERS):
            raise TaskError(f"the row has {len(choices)} options: give at most {len(_LETTERS)}")
        for label, text in (("label", "text"), ("key", "value")):
            if all(isinstance(choice, Mapping) and {label, text} <= choice.keys() for choice in choices):
                return [(str(choice[label]).strip(), _option_text(choice[text])) for choice in choices]
        texts = [_option_text(choice) for choice in choices]
        labelled = [_LABELLED.match(text) for text in texts]
        labels = [match[1] for match in labelled if match]
        if len(set(labels)) == len(texts):
            return [(match[1], text[match.end() :]) for match, text in zip(labelled, texts, strict=True) if match]
        return list(zip(_LETTERS, texts, strict=False))
    if choices is None and isinstance(row.get("answer"), bool):
        return [("A", "Yes"), ("B", "No")]
    if choices is None:
        return None
    raise TaskError(
        f"the options {str(choices)[:80]!r} have an unknown format: give a list of texts, or of labels and texts"
    )


def _option_text(option: Any) -> str:
    if isinstance(option, Mapping | list | tuple):
        raise TaskError(f"the option {option!r:.60} is not text: give each option a text")
    return "" if option is None or option != option else str(option)  # NaN is a missing cell


def _lettered(pairs: Sequence[tuple[str, str]]) -> dict[str, str]:
    letters = [label.upper() for label, _ in pairs]
    if len(set(letters)) < len(pairs) or not all(len(label) == 1 and label in _LETTERS for label in letters):
        letters = list(_LETTERS[: len(pairs)])
    return {letter: text for letter, (_, text) in zip(letters, pairs, strict=True)}
