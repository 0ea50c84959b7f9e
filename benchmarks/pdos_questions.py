"""The questions of PDOS's Table 1: retrieval, planning over aspects, answers from several documents (section 4.2).

Each question asks for independent steps and a conclusion, and has one worked example that shows the format to small
models. People, topics, aspects and documents are generated from a seed and the words in `prompts/pdos`.
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

from tot.decoders.methods.steps_format import END, header

_A_STEP, _AN_ASPECT, _CONCLUSION = 32, 64, 64
"""Maximum tokens of an answer: per step, per step of a plan, and for the conclusion."""
_NO_HELP = ("It does not help.", "no help")
"""The step, and its draft, of a passage that does not help."""
_ITEM = re.compile(r"^[ \t]*(?:[-*•]|\(?\d{1,3}[.)])[ \t]+(\S.*?)[ \t]*$", re.MULTILINE)
_DATA = json.loads((files("tot.prompts") / "pdos" / "questions.json").read_text(encoding="utf-8"))
_WORDS = {kind: line.split() for name in ("retrieval", "documents") for kind, line in _DATA[name]["words"].items()}


def listed(text: str) -> list[str]:
    """Return the items of numbered and bulleted lists in a text, each up to its first colon."""
    return [title for item in _ITEM.findall(text) if (title := item.split(":")[0].strip())]


@dataclass(frozen=True)
class Example:
    """A question of the same kind with its answer."""

    text: str
    steps: tuple[tuple[str, str, str], ...]
    """(title, full text, draft) of each step."""
    conclusion: str
    last: str
    """Title of the conclusion in an outline."""

    def in_steps(self, drafts: bool = False) -> str:
        """Return the answer in the format of steps, or of their drafts."""
        steps = [f"{header(title)} {draft if drafts else whole}\n" for title, whole, draft in self.steps]
        return "".join(steps) + END + self.conclusion


@dataclass(frozen=True)
class PDOSQuestion:
    """A question and how to check its answer."""

    text: str
    titles: tuple[str, ...]
    """Titles of the steps."""
    example: Example
    step_tokens: int
    """Maximum tokens of a step."""
    is_right: Callable[[str], bool] | None = None
    """Whether an answer is right; None for a plan, which a model marks."""
    right_steps: Callable[[str], float] | None = None
    """Share of an answer's steps that are right; None for a plan."""
    answered: Example | None = None
    """The question with a right answer; None for a plan."""

    @property
    def tokens(self) -> int:
        """Maximum tokens of an answer."""
        return len(self.titles) * self.step_tokens + _CONCLUSION


def _example(text: str, example: Mapping[str, Any]) -> Example:
    return Example(text, tuple(map(tuple, example["steps"])), example["conclusion"], example["last"])


def _names(chance: random.Random, count: int) -> list[str]:
    return chance.sample([f"{first} {family}" for first in _WORDS["first"] for family in _WORDS["family"]], count)


def _who(people: Sequence[str], low: str, high: str) -> str:
    return (
        f"These are the résumés of {len(people)} people.\n\n" + "\n".join(people) + "\n\n"
        f"Whose GPA lies between {low} and {high}? Look at every person in turn, with the name as the title: say what "
        "the GPA is and whether it lies between the two, yes or no. Then end with a line that says "
        '"Name: " and the name.'
    )


def retrieval(people: int, seed: int) -> PDOSQuestion:
    """Ask which of 4 to 100 generated `people` has a GPA within a range."""
    chance = random.Random(f"{people} {seed}")
    names = _names(chance, people)
    grades = chance.sample(range(150, 451, 3), people)
    lines = [
        f"{name}, {chance.randint(20, 39)}, studied {chance.choice(_WORDS['subject'])} in "
        f"{chance.choice(_WORDS['town'])}. GPA {grade / 100:.2f}. "
        f"Likes {' and '.join(chance.sample(_WORDS['pastime'], 2))}."
        for name, grade in zip(names, grades, strict=True)
    ]
    chosen = chance.randrange(people)
    below = max((grade for grade in grades if grade < grades[chosen]), default=100)
    above = min((grade for grade in grades if grade > grades[chosen]), default=500)
    low, high = chance.randint(below + 1, grades[chosen] - 1), chance.randint(grades[chosen] + 1, above - 1)
    text = _who(lines, f"{low / 100:.2f}", f"{high / 100:.2f}")
    shown = _DATA["retrieval"]["example"]
    example = _example(_who(shown["people"], shown["low"], shown["high"]), shown)
    answer = tuple((name, *_compared(grade, low, high)) for name, grade in zip(names, grades, strict=True))
    answered = Example(text, answer, f"Name: {names[chosen]}", example.last)
    right = partial(names_only, name=names[chosen], names=names)
    known = {name: (grade / 100, name == names[chosen]) for name, grade in zip(names, grades, strict=True)}
    return PDOSQuestion(text, tuple(names), example, _A_STEP, right, partial(right_share, known=known), answered)


def _compared(grade: int, low: int, high: int) -> tuple[str, str]:
    """Return a right step about a GPA, and its draft."""
    number = f"{grade / 100:.2f}"
    if low < grade < high:
        return f"The GPA is {number}, which is between the two, so yes.", f"{number}, yes"
    where = f"below {low / 100:.2f}" if grade < low else f"above {high / 100:.2f}"
    return f"The GPA is {number}, which is {where}, so no.", f"{number}, no"


def names_only(text: str, name: str, names: Sequence[str]) -> bool:
    """Exact match: the last line with "Name:" contains `name` and no other of `names`."""
    return [one for one in names if one in _after("name", text)] == [name]


def right_share(text: str, known: Mapping[str, tuple[float, bool]]) -> float:
    """Return the share of the people whose step states their GPA and whether it lies in the range, as yes or no.

    `known` has both by name. Of a repeated step the last one counts, and of a step its first line.
    """
    right = 0
    for name, (grade, inside) in known.items():
        line = _step(name, text)
        verdicts = re.findall(r"\b(?:yes|no)\b", line.lower())
        right += grade in map(float, re.findall(r"\d+\.\d+", line)) and verdicts[-1:] == ["yes" if inside else "no"]
    return right / len(known)


def _plan(topic: str, aspects: Sequence[str]) -> str:
    return (
        f"Make a plan for {topic}. Look at these aspects, each by itself:\n"
        + "\n".join(f"- {aspect}" for aspect in aspects)
        + "\n\nWrite two sentences about each, with the aspect as the title. Then end with a sentence that sums "
        "the plan up."
    )


def planning(aspects: int, seed: int) -> PDOSQuestion:
    """Ask for a plan over 2 to 10 `aspects`, which the prompt lists."""
    data, chance = _DATA["planning"], random.Random(f"{aspects} {seed}")
    text = _plan(chance.choice(data["topics"]), chosen := tuple(chance.sample(data["aspects"], aspects)))
    shown = data["example"]
    return PDOSQuestion(text, chosen, _example(_plan(shown["topic"], shown["aspects"]), shown), _AN_ASPECT)


def _read_on(passages: Sequence[str], question: str) -> str:
    return (
        "\n\n".join(f"Passage {number}:\n{passage}" for number, passage in enumerate(passages, 1)) + "\n\n"
        f"Question: {question}\nLook at every passage in turn, with its number as the title: say whether it helps to "
        'answer the question, and how. Then end with a line that says "Answer: " and a short answer.'
    )


def documents(passages: int, seed: int) -> PDOSQuestion:
    """Ask a question that needs two of 4 to 100 generated `passages`, as 2WikiMultihopQA does: film, then director.

    The other passages are about other films and directors. A step is right if it names the director (the film's
    passage) or the birthplace (the director's), or says that its passage does not help.
    """
    chance, pairs = random.Random(f"documents {passages} {seed}"), (passages + 1) // 2
    films = chance.sample([f"The {color} {thing}" for color in _WORDS["color"] for thing in _WORDS["thing"]], pairs)
    names = _names(chance, pairs)
    births = [chance.sample(_WORDS["town"], 2) for _ in names]
    directed = [
        f"{film} is a film of {chance.randint(1950, 2009)}. It was directed by {name}."
        for film, name in zip(films, names, strict=True)
    ]
    born = [
        f"{name} was a director, born in {birth}, who died in {death}."
        for name, (birth, death) in zip(names, births, strict=True)
    ]
    town = births[0][0]
    helpful = {
        directed[0]: (names[0], f"It says that {names[0]} directed {films[0]}.", f"director: {names[0]}"),
        born[0]: (town, f"It says that {names[0]} was born in {town}.", f"{names[0]} born in {town}"),
    }
    shuffled = [directed[0], born[0], *chance.sample([*directed[1:], *born[1:]], passages - 2)]
    chance.shuffle(shuffled)
    titles = tuple(f"Passage {number}" for number in range(1, passages + 1))
    facts = [helpful.get(passage, (None, *_NO_HELP)) for passage in shuffled]
    text = _read_on(shuffled, f"Where was the director of {films[0]} born?")
    shown = _DATA["documents"]["example"]
    example = _example(_read_on(shown["passages"], shown["asked"]), shown)
    answer = tuple((title, whole, draft) for title, (_, whole, draft) in zip(titles, facts, strict=True))
    answered = Example(text, answer, f"Answer: {town}", example.last)
    needed = {title: fact for title, (fact, *_) in zip(titles, facts, strict=True)}
    right = partial(contains, answer=town)
    return PDOSQuestion(text, titles, example, _A_STEP, right, partial(right_passages, needed=needed), answered)


def right_passages(text: str, needed: Mapping[str, str | None]) -> float:
    """Return the share of the passages whose step names the needed fact, or says that the passage does not help.

    `needed` has the fact by title; None if the passage does not help.
    """
    right = 0
    for title, fact in needed.items():
        line = _step(title, text)
        unhelpful = re.search(r"\b(?:not?|doesn['’]t|isn['’]t)\b", line.lower()) is not None
        right += unhelpful if fact is None else not unhelpful and fact in line
    return right / len(needed)


def contains(text: str, answer: str) -> bool:
    """Whether the last line with "Answer:" contains `answer` as a word, ignoring case."""
    return re.search(rf"\b{re.escape(answer)}\b", _after("answer", text), re.IGNORECASE) is not None


def _step(title: str, text: str) -> str:
    """Return the first line of the last step with this title, or an empty text."""
    return str((re.findall(rf"{re.escape(title)}\W*:\W*(.*)", text) or [""])[-1])


def _after(label: str, text: str) -> str:
    """Return the text after the label and a colon, in the last line that has both; empty if no line has."""
    return str((re.findall(rf"{label}\W*:(.*)", text, flags=re.IGNORECASE) or [""])[-1])
