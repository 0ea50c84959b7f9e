"""The questions of PDOS's Table 1: retrieval, and planning over aspects (section 4.2).

Each consists of steps that don't need each other and a conclusion, says so, and comes with one worked example, from
which also a small model sees the form. People, topics and aspects are made up here from a seed, of words in
`prompts/pdos`.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.resources import files
from typing import Any

_A_STEP, _AN_ASPECT, _CONCLUSION = 32, 64, 64
"""Tokens that an answer may have: for each step, of a plan more, and besides."""
_DATA = json.loads((files("tot.prompts") / "pdos" / "questions.json").read_text(encoding="utf-8"))


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
class Question:
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


def retrieval(people: int, seed: int) -> Question:
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
    return Question(text, tuple(names), example, _A_STEP, right, reference=names[chosen])


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


def planning(aspects: int, seed: int) -> Question:
    """A plan over so many aspects, 2 to 10, which the prompt lists."""
    data, chance = _DATA["planning"], random.Random(f"{aspects} {seed}")
    text = _plan(chance.choice(data["topics"]), chosen := tuple(chance.sample(data["aspects"], aspects)))
    shown = data["example"]
    example = _example(_plan(shown["topic"], shown["aspects"]), shown)
    return Question(text, chosen, example, _AN_ASPECT, about=text)


def _after(label: str, text: str) -> str | None:
    """What follows the label and a colon, in the last line that has both."""
    lines = re.findall(rf"{label}\W*:(.*)", text, flags=re.IGNORECASE)
    return str(lines[-1]) if lines else None
