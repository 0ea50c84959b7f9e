"""The questions of PDOS's Table 1: retrieval, planning over aspects, answers from several documents (section 4.2).

Each consists of steps that don't need each other and a conclusion, says so, and comes with one worked example, from
which also a small model sees the form. People, topics and aspects are made up here from a seed, of words in
`prompts/pdos`; documents are a file's.
"""

from __future__ import annotations

import json
import random
import re
import string
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.resources import files
from itertools import islice
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, Field, field_validator

from tot.decoders.errors import OptionError, validated
from tot.evaluation.data import rows

_A_STEP, _AN_ASPECT, _CONCLUSION = 32, 64, 64
"""Tokens that an answer may have: for each step, of a plan more, and besides."""
_ITEM = re.compile(r"^[ \t]*(?:[-*•]|\(?\d{1,3}[.)])[ \t]+(\S.*?)[ \t]*$", re.MULTILINE)
_DATA = json.loads((files("tot.prompts") / "pdos" / "questions.json").read_text(encoding="utf-8"))


def listed(text: str) -> list[str]:
    """The items of numbered and bulleted lists in a text, each up to its first colon."""
    return [title for item in _ITEM.findall(text) if (title := item.split(":")[0].strip())]


@dataclass(frozen=True)
class Example:
    """A question of the same kind with its answer."""

    text: str
    steps: tuple[tuple[str, str, str], ...]
    """Of each its title, itself written out, and as a draft."""
    conclusion: str
    last: str
    """The conclusion's title where the answer is an outline."""


@dataclass(frozen=True)
class PDOSQuestion:
    """What is asked, and what is known of its answer."""

    text: str
    titles: tuple[str, ...]
    """Of the steps."""
    example: Example
    step_tokens: int
    """Most tokens of a step."""
    is_right: Callable[[str], bool] | None = None
    """Whether an answer is right, where that can be told."""
    about: str | None = None
    """What a judge is told of the question; None: the answer needs none."""
    reference: str | None = None

    @property
    def tokens(self) -> int:
        """Most tokens of an answer."""
        return len(self.titles) * self.step_tokens + _CONCLUSION


def _example(text: str, given: Mapping[str, Any]) -> Example:
    title_whole_draft = tuple((title, whole, draft) for title, whole, draft in given["steps"])
    return Example(text, title_whole_draft, given["conclusion"], given["last"])


def _who(people: Sequence[str], low: str, high: str) -> str:
    return (
        f"These are the résumés of {len(people)} people.\n\n" + "\n".join(people) + "\n\n"
        f"Whose GPA lies between {low} and {high}? Look at every person in turn, with the name as the title: say what "
        'the GPA is and whether it lies between the two. Then end with a line that says "Name: " and the name.'
    )


def retrieval(people: int, seed: int) -> PDOSQuestion:
    """Which of so many made-up people, 4 to 100, has a GPA within a range?"""
    data = _DATA["retrieval"]
    words, shown = {kind: line.split() for kind, line in data["words"].items()}, data["example"]
    chance = random.Random(f"{people} {seed}")
    names = chance.sample([f"{first} {family}" for first in words["first"] for family in words["family"]], people)
    grades = chance.sample(range(150, 451, 3), people)
    lines = [
        f"{name}, {chance.randint(20, 39)}, studied {chance.choice(words['subject'])} in "
        f"{chance.choice(words['town'])}. GPA {grade / 100:.2f}. "
        f"Likes {' and '.join(chance.sample(words['pastime'], 2))}."
        for name, grade in zip(names, grades, strict=True)
    ]
    chosen = chance.randrange(people)
    below = max((grade for grade in grades if grade < grades[chosen]), default=100)
    above = min((grade for grade in grades if grade > grades[chosen]), default=500)
    low, high = chance.randint(below + 1, grades[chosen] - 1), chance.randint(grades[chosen] + 1, above - 1)
    text = _who(lines, f"{low / 100:.2f}", f"{high / 100:.2f}")
    right = partial(names_only, name=names[chosen], names=tuple(names))
    example = _example(_who(shown["people"], shown["low"], shown["high"]), shown)
    return PDOSQuestion(text, tuple(names), example, _A_STEP, right, reference=names[chosen])


def names_only(text: str, name: str, names: Sequence[str]) -> bool:
    """Exact match: of all `names` it is `name` that the last line with "Name:" gives."""
    last = _after("name", text)
    return last is not None and [one for one in names if one in last] == [name]


def _plan(topic: str, aspects: Sequence[str]) -> str:
    return (
        f"Make a plan for {topic}. Look at these aspects, each by itself:\n"
        + "\n".join(f"- {aspect}" for aspect in aspects)
        + "\n\nWrite two sentences about each, with the aspect as the title. Then end with a sentence that sums "
        "the plan up."
    )


def planning(aspects: int, seed: int) -> PDOSQuestion:
    """A plan over so many aspects, 2 to 10, which the prompt lists."""
    data, chance = _DATA["planning"], random.Random(f"{aspects} {seed}")
    text = _plan(chance.choice(data["topics"]), chosen := tuple(chance.sample(data["aspects"], aspects)))
    shown = data["example"]
    example = _example(_plan(shown["topic"], shown["aspects"]), shown)
    return PDOSQuestion(text, chosen, example, _AN_ASPECT, about=text)


def _read_on(passages: Sequence[str], asked: str) -> str:
    return (
        "\n\n".join(f"Passage {number}:\n{passage}" for number, passage in enumerate(passages, 1)) + "\n\n"
        f"Question: {asked}\nLook at every passage in turn, with its number as the title: say whether it helps to "
        'answer the question, and how. Then end with a line that says "Answer: " and a short answer.'
    )


def multi_document(
    path: Path, count: int, holds: Callable[[PDOSQuestion], bool]
) -> tuple[list[PDOSQuestion], list[tuple[int, int]]]:
    """The first `count` questions of a file in the format of LongBench's 2WikiMultihopQA.

    A question keeps as many of its passages, from the first, as `holds` accepts. Returns besides, by question: passages
    kept, and passages that there were. Raises OptionError for rows that are none, and where not even one passage fits.
    """
    questions: list[PDOSQuestion] = []
    kept = []
    shown = _DATA["documents"]["example"]
    example = _example(_read_on(shown["passages"], shown["asked"]), shown)
    for number, row in enumerate(islice(rows(path), count)):
        asked = validated(_Row, row, f"{path}, row {number} of 2WikiMultihopQA's format")
        passages = asked.passages
        for length in range(len(passages), 0, -1):
            titles = tuple(f"Passage {i}" for i in range(1, length + 1))
            text, right = _read_on(passages[:length], asked.input), partial(contains, answers=asked.answers)
            question = PDOSQuestion(text, titles, example, _A_STEP, right, asked.input, asked.answers[0])
            if holds(question):
                break
        else:
            raise OptionError(
                f"{path}, row {number}: its first passage alone is longer than the model's context: choose a model "
                "with a longer one"
            )
        kept.append((length, len(passages)))
        questions.append(question)
    if not questions:
        raise OptionError(f"{path} has no rows: give a file with some")
    return questions, kept


class _Row(BaseModel):
    """A row in the format of LongBench's 2WikiMultihopQA."""

    input: str = Field(pattern=r"\w")
    context: str = Field(pattern=r"\w")
    answers: Annotated[tuple[Annotated[str, Field(pattern=r"\w")], ...], Field(min_length=1)]

    @field_validator("answers", mode="before")
    @classmethod
    def _several(cls, value: Any) -> Any:
        return (value,) if isinstance(value, str) else value

    @property
    def passages(self) -> list[str]:
        pieces = re.split(r"^Passage \d{1,4}:", self.context, flags=re.MULTILINE)
        return [text.strip() for text in pieces if text.strip()]


def contains(text: str, answers: Sequence[str]) -> bool:
    """Whether the last line with "Answer:" contains one of `answers`, whatever the case and the punctuation."""
    last = _after("answer", text)
    return last is not None and any(f" {_normal(answer)} " in f" {_normal(last)} " for answer in answers)


def _normal(text: str) -> str:
    kept = text.lower().translate(str.maketrans(string.punctuation, " " * len(string.punctuation)))
    return " ".join(kept.split())


def _after(label: str, text: str) -> str | None:
    """What follows the label and a colon, in the last line that has both."""
    lines = re.findall(rf"{label}\W*:(.*)", text, flags=re.IGNORECASE)
    return str(lines[-1]) if lines else None
