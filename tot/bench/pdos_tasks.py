"""The questions of PDOS's Table 1: retrieval, planning over aspects, answers from several documents (section 4.2).

Each consists of steps that don't need each other and a conclusion, says so, and comes with one worked example, from
which also a small model sees the form. People, topics and aspects are made up here from a seed; documents are a file's.
"""

from __future__ import annotations

import random
import re
import string
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from tot.data import rows
from tot.decoders.errors import OptionError

PEOPLE = range(4, 101)
ASPECTS = range(2, 11)
_A_STEP, _AN_ASPECT, _CONCLUSION = 32, 64, 64
"""Tokens that an answer may have: for each step, of a plan more, and besides."""
_COLUMNS = ("input", "context", "answers")


@dataclass(frozen=True)
class Step:
    """A step of a worked example, written out and as a draft."""

    title: str
    whole: str
    draft: str


@dataclass(frozen=True)
class Example:
    """A question of the same kind with its answer."""

    text: str
    steps: tuple[Step, ...]
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


# -- retrieval ------------------------------------------------------------------------------------------------------

_FIRST, _FAMILY, _TOWNS, _SUBJECTS, _PASTIMES = (
    line.split()
    for line in (
        "Amara Bence Carla Dmitri Elin Farid Greta Hugo Ines Jonas Keiko Leila Marek Nadia Oscar Petra Rosa Stefan Zoe",
        "Abendroth Bianchi Castellan Dvorak Eriksen Fontaine Hartmann Ishikawa Jansen Kowalski Moreau Novak Weaver",
        "Bergen Coimbra Delft Ghent Graz Izmir Kyoto Lausanne Lyon Oulu Porto Tartu Turin Uppsala Zagreb",
        "architecture biology chemistry design economics geology history law linguistics nursing physics",
        "baking chess climbing cycling drawing gardening music pottery sailing theatre",
    )
)


def _who(people: Sequence[str], low: str, high: str) -> str:
    return (
        f"These are the résumés of {len(people)} people.\n\n" + "\n".join(people) + "\n\n"
        f"Whose GPA lies between {low} and {high}? Look at every person in turn, with the name as the title: say what "
        'the GPA is and whether it lies between the two. Then end with a line that says "Name: " and the name.'
    )


_PEOPLE_EXAMPLE = Example(
    _who(
        (
            "Vera Lind, 31, studied medicine in Basel. GPA 3.80. Likes rowing and films.",
            "Tomas Rojas, 24, studied botany in Leeds. GPA 1.95. Likes maps and skiing.",
            "Yusuf Demir, 28, studied logic in Gdansk. GPA 2.61. Likes bread and kites.",
        ),
        "2.40",
        "2.90",
    ),
    (
        Step("Vera Lind", "The GPA is 3.80, which is above 2.90, so no.", "3.80, no"),
        Step("Tomas Rojas", "The GPA is 1.95, which is below 2.40, so no.", "1.95, no"),
        Step("Yusuf Demir", "The GPA is 2.61, which is between the two, so yes.", "2.61, yes"),
    ),
    "Name: Yusuf Demir",
    "Name",
)


def retrieval(people: int, seed: int) -> Question:
    """Which of so many made-up people has a GPA within a range? Raises OptionError outside of 4 to 100."""
    if people not in PEOPLE:
        raise OptionError(f"{people} people can't be asked about: choose {PEOPLE[0]} to {PEOPLE[-1]}")
    chance = random.Random(f"{people} {seed}")
    names = chance.sample([f"{first} {family}" for first in _FIRST for family in _FAMILY], people)
    grades = chance.sample(range(150, 451, 3), people)
    lines = [
        f"{name}, {chance.randint(20, 39)}, studied {chance.choice(_SUBJECTS)} in {chance.choice(_TOWNS)}. "
        f"GPA {grade / 100:.2f}. Likes {' and '.join(chance.sample(_PASTIMES, 2))}."
        for name, grade in zip(names, grades, strict=True)
    ]
    chosen = chance.randrange(people)
    below = max((grade for grade in grades if grade < grades[chosen]), default=100)
    above = min((grade for grade in grades if grade > grades[chosen]), default=500)
    low, high = chance.randint(below + 1, grades[chosen] - 1), chance.randint(grades[chosen] + 1, above - 1)
    text = _who(lines, f"{low / 100:.2f}", f"{high / 100:.2f}")
    right = partial(names_only, name=names[chosen], names=tuple(names))
    return Question(text, tuple(names), _PEOPLE_EXAMPLE, _A_STEP, right, reference=names[chosen])


def names_only(text: str, name: str, names: Sequence[str]) -> bool:
    """Exact match: of all `names` it is `name` that the last line with "Name:" gives."""
    last = _after("name", text)
    return last is not None and [one for one in names if one in last] == [name]


# -- planning -------------------------------------------------------------------------------------------------------

_TOPICS = (
    "a bakery in a harbour town",
    "a night bus to the suburbs",
    "a garden behind a school",
    "a library that lends tools",
    "a museum of clocks",
    "a footbridge over a river",
    "a travelling cinema",
    "a farm shop",
    "a summer camp for musicians",
    "a bicycle workshop",
    "a flood warning service",
    "a bookshop for used books",
    "a chess club for beginners",
    "a weather station on a mountain",
    "a kitchen that cooks for three schools",
    "a ferry between two islands",
)
_ASPECTS = (
    *("costs", "staff", "place", "opening hours", "safety", "noise", "neighbours", "bad weather", "advertising"),
    *("repairs", "permits", "equipment", "visitors", "the first year"),
)


def _plan(topic: str, aspects: Sequence[str]) -> str:
    return (
        f"Make a plan for {topic}. Look at these aspects, each by itself:\n"
        + "\n".join(f"- {aspect}" for aspect in aspects)
        + "\n\nWrite two sentences about each, with the aspect as the title. Then end with a sentence that sums "
        "the plan up."
    )


_PLAN_EXAMPLE = Example(
    _plan("a garden party", ("food", "music", "guests")),
    (
        Step(
            "food",
            "Every guest brings a salad or a cake, which a list on the door sorts out. Two of them see to the grill, "
            "and the hosts buy bread and drinks for all.",
            "guests bring it",
        ),
        Step(
            "music",
            "A neighbour plays the guitar from six until nine, so that no child is kept awake. After that people talk, "
            "and whoever wants to dance goes indoors.",
            "guitar until nine",
        ),
        Step(
            "guests",
            "Twenty people are asked by letter, three weeks before. Whoever has not replied a week later is called, so "
            "that there are chairs enough.",
            "twenty, by letter",
        ),
    ),
    "It is a small party that costs little and is easy to prepare.",
    "Summary",
)


def planning(aspects: int, seed: int) -> Question:
    """A plan over so many aspects, which the prompt lists. Raises OptionError outside of 2 to 10."""
    if aspects not in ASPECTS:
        raise OptionError(f"{aspects} aspects can't be asked about: choose {ASPECTS[0]} to {ASPECTS[-1]}")
    chance = random.Random(f"{aspects} {seed}")
    text = _plan(chance.choice(_TOPICS), chosen := tuple(chance.sample(_ASPECTS, aspects)))
    return Question(text, chosen, _PLAN_EXAMPLE, _AN_ASPECT, about=text)


# -- answers from several documents ---------------------------------------------------------------------------------


def _read_on(passages: Sequence[str], asked: str) -> str:
    return (
        "\n\n".join(f"Passage {number}:\n{passage}" for number, passage in enumerate(passages, 1)) + "\n\n"
        f"Question: {asked}\nLook at every passage in turn, with its number as the title: say whether it helps to "
        'answer the question, and how. Then end with a line that says "Answer: " and a short answer.'
    )


_PASSAGES_EXAMPLE = Example(
    _read_on(
        (
            "The Blue Gate is a film of 1961. It was directed by Anna Berg.",
            "Lake Oma lies in the north. Nobody lives there in winter.",
            "Anna Berg was a director. She was born in Malmö and died in Rome.",
        ),
        "Where was the director of The Blue Gate born?",
    ),
    (
        Step("Passage 1", "It says that Anna Berg directed The Blue Gate.", "director: Anna Berg"),
        Step("Passage 2", "It is about a lake and does not help.", "no help"),
        Step("Passage 3", "It says that Anna Berg was born in Malmö.", "Berg born in Malmö"),
    ),
    "Answer: Malmö",
    "Answer",
)


def multi_document(
    path: Path, count: int, holds: Callable[[Question], bool]
) -> tuple[list[Question], list[tuple[int, int]]]:
    """The first `count` questions of a file in the format of LongBench's 2WikiMultihopQA.

    A question keeps as many of its passages, from the first, as `holds` accepts. Returns besides, by question: passages
    kept, and passages that there were. Raises OptionError for rows that are none, and where not even one passage fits.
    """
    questions: list[Question] = []
    kept = []
    for number, row in enumerate(rows(path)):
        if len(questions) == count:
            break
        asked, answers, passages = _checked(row, number, path)
        for length in range(len(passages), 0, -1):
            question = Question(
                _read_on(passages[:length], asked),
                tuple(f"Passage {i}" for i in range(1, length + 1)),
                _PASSAGES_EXAMPLE,
                _A_STEP,
                partial(contains, answers=answers),
                asked,
                answers[0],
            )
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


def _checked(row: Mapping[str, Any], number: int, path: Path) -> tuple[str, tuple[str, ...], list[str]]:
    """A row's question, its answers and its passages."""
    missing = [column for column in _COLUMNS if row.get(column) is None]
    if missing:
        raise OptionError(
            f"{path}, row {number} has no {missing[0]!r} among {', '.join(map(repr, row))}: give a file in the format "
            "of LongBench's 2WikiMultihopQA"
        )
    asked, context, answers = (row[column] for column in _COLUMNS)
    answers = tuple(answers) if isinstance(answers, list) else (answers,)
    if not all(isinstance(text, str) and _normal(text) for text in (asked, context, *(answers or ("",)))):
        raise OptionError(f"{path}, row {number}: input and context are to be text, and answers a list of texts")
    passages = [text.strip() for text in re.split(r"^Passage \d{1,4}:", context, flags=re.MULTILINE)]
    return asked, answers, list(filter(None, passages)) or [context]


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
