"""The questions of PDOS's Table 1: retrieval, planning over aspects, answers from several documents (section 4.2).

Each question asks for independent steps and a conclusion, and has one worked example that shows the format to small
models. Texts are made of a seed, and of the templates and words in `pdos_questions.json`.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

from tot.decoders.methods.steps_format import END, header

_A_STEP, _AN_ASPECT, _CONCLUSION = 32, 64, 64
"""Maximum tokens of an answer: per step, per step of a plan, and for the conclusion."""
_ITEM = re.compile(r"^[ \t]*(?:[-*•]|\(?\d{1,3}[.)])[ \t]+(\S.*?)[ \t]*$", re.MULTILINE)
_DATA = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))
_WORDS = {kind: line.split() for name in ("retrieval", "documents") for kind, line in _DATA[name]["words"].items()}
Step = tuple[str, str, str]
"""Title, full text and draft."""


def listed(text: str) -> list[str]:
    """Return the items of numbered and bulleted lists in a text, each up to its first colon."""
    return [title for item in _ITEM.findall(text) if (title := item.split(":")[0].strip())]


@dataclass(frozen=True)
class Example:
    """A question of the same kind with its answer."""

    text: str
    steps: tuple[Step, ...]
    conclusion: str
    last: str
    """Title of the conclusion in an outline."""

    @classmethod
    def of(cls, text: str, data: Mapping[str, Any]) -> Example:
        """Return an example with the answer in the data."""
        return cls(text, tuple(map(tuple, data["steps"])), data["conclusion"], data["last"])

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
    answered: Example | None = None
    """The question with a right answer; None for a plan, which a model marks."""
    candidates: tuple[str, ...] = ()
    """Answers that a conclusion may name; the first one is right."""
    checks: tuple[Callable[[str], bool], ...] = ()
    """For each title, whether a step's first line is right."""

    @property
    def tokens(self) -> int:
        """Maximum tokens of an answer."""
        return len(self.titles) * self.step_tokens + _CONCLUSION

    def right(self, text: str) -> float | None:
        """Return whether the last line with the conclusion's title names the right candidate alone; None for a plan."""
        if not self.candidates:
            return None
        last = (re.findall(rf"{self.example.last}\W*:(.*)", text, re.IGNORECASE) or [""])[-1]
        named = [one for one in self.candidates if re.search(rf"\b{re.escape(one)}\b", last, re.IGNORECASE)]
        return float(named == [self.candidates[0]])

    def right_steps(self, text: str) -> float | None:
        """Return the share of right steps; None for a plan. Of a repeated step the last one counts."""
        if not self.checks:
            return None
        lines = [(re.findall(rf"{re.escape(title)}\W*:\W*(.*)", text) or [""])[-1] for title in self.titles]
        return fmean(check(line) for check, line in zip(self.checks, lines, strict=True))


def _names(chance: random.Random, count: int) -> list[str]:
    return chance.sample([f"{first} {family}" for first in _WORDS["first"] for family in _WORDS["family"]], count)


def _who(people: Sequence[str], low: str, high: str) -> str:
    return str(_DATA["retrieval"]["prompt"].format(count=len(people), people="\n".join(people), low=low, high=high))


def retrieval(people: int, seed: int) -> PDOSQuestion:
    """Ask which of 4 to 100 generated `people` has a GPA within a range. A step gives a GPA, and says yes or no."""
    data, chance = _DATA["retrieval"], random.Random(f"{people} {seed}")
    names = _names(chance, people)
    grades = chance.sample(range(150, 451, 3), people)
    lines = [
        data["person"].format(
            name=name,
            age=chance.randint(20, 39),
            subject=chance.choice(_WORDS["subject"]),
            town=chance.choice(_WORDS["town"]),
            grade=grade / 100,
            likes=" and ".join(chance.sample(_WORDS["pastime"], 2)),
        )
        for name, grade in zip(names, grades, strict=True)
    ]
    chosen = chance.randrange(people)
    below = max((grade for grade in grades if grade < grades[chosen]), default=100)
    above = min((grade for grade in grades if grade > grades[chosen]), default=500)
    low, high = chance.randint(below + 1, grades[chosen] - 1), chance.randint(grades[chosen] + 1, above - 1)
    text = _who(lines, f"{low / 100:.2f}", f"{high / 100:.2f}")
    shown = data["example"]
    example = Example.of(_who(shown["people"], shown["low"], shown["high"]), shown)

    def step(name: str, grade: int) -> Step:
        place = "inside" if low < grade < high else "below" if grade < low else "above"
        whole, draft = (one.format(grade=grade / 100, low=low / 100, high=high / 100) for one in data["steps"][place])
        return name, whole, draft

    steps = tuple(map(step, names, grades))
    answered = Example(text, steps, f"Name: {names[chosen]}", example.last)
    candidates = (names[chosen], *(name for name in names if name != names[chosen]))
    checks = tuple(partial(_says_grade, grade=grade / 100, inside=low < grade < high) for grade in grades)
    return PDOSQuestion(text, tuple(names), example, _A_STEP, answered, candidates, checks)


def _says_grade(line: str, grade: float, inside: bool) -> bool:
    verdicts = re.findall(r"\b(?:yes|no)\b", line.lower())
    return grade in map(float, re.findall(r"\d+\.\d+", line)) and verdicts[-1:] == ["yes" if inside else "no"]


def _plan(topic: str, aspects: Sequence[str]) -> str:
    listing = "\n".join(f"- {aspect}" for aspect in aspects)
    return str(_DATA["planning"]["prompt"].format(topic=topic, aspects=listing))


def planning(aspects: int, seed: int) -> PDOSQuestion:
    """Ask for a plan over 2 to 10 `aspects`, which the prompt lists."""
    data, chance = _DATA["planning"], random.Random(f"{aspects} {seed}")
    text = _plan(chance.choice(data["topics"]), chosen := tuple(chance.sample(data["aspects"], aspects)))
    shown = data["example"]
    return PDOSQuestion(text, chosen, Example.of(_plan(shown["topic"], shown["aspects"]), shown), _AN_ASPECT)


def _read_on(passages: Sequence[str], asked: str) -> str:
    listing = "\n\n".join(f"Passage {number}:\n{passage}" for number, passage in enumerate(passages, 1))
    return str(_DATA["documents"]["prompt"].format(passages=listing, asked=asked))


def documents(passages: int, seed: int) -> PDOSQuestion:
    """Ask a question that needs two of 4 to 100 generated `passages`, as 2WikiMultihopQA does: film, then director.

    The other passages are about other films and directors. A step is right if it names the director (the film's
    passage) or the birthplace (the director's), or says that its passage does not help.
    """
    data, chance = _DATA["documents"], random.Random(f"documents {passages} {seed}")
    pairs = (passages + 1) // 2
    films = chance.sample([f"The {color} {thing}" for color in _WORDS["color"] for thing in _WORDS["thing"]], pairs)
    names = _names(chance, pairs)
    births = [chance.sample(_WORDS["town"], 2) for _ in names]
    directed = [
        data["film"].format(film=film, year=chance.randint(1950, 2009), name=name)
        for film, name in zip(films, names, strict=True)
    ]
    born = [
        data["person"].format(name=name, birth=birth, death=death)
        for name, (birth, death) in zip(names, births, strict=True)
    ]
    town = births[0][0]
    facts = {directed[0]: ("film", names[0]), born[0]: ("person", town)}
    shuffled = [directed[0], born[0], *chance.sample([*directed[1:], *born[1:]], passages - 2)]
    chance.shuffle(shuffled)
    titles = tuple(f"Passage {number}" for number in range(1, passages + 1))
    found = [facts.get(passage, ("other", None)) for passage in shuffled]
    text = _read_on(shuffled, data["asked"].format(film=films[0]))
    shown = data["example"]
    example = Example.of(_read_on(shown["passages"], shown["asked"]), shown)

    def step(title: str, kind: str) -> Step:
        whole, draft = (one.format(name=names[0], film=films[0], town=town) for one in data["steps"][kind])
        return title, whole, draft

    steps = tuple(map(step, titles, (kind for kind, _ in found)))
    answered = Example(text, steps, f"Answer: {town}", example.last)
    checks = tuple(partial(_says_fact, fact=fact) for _, fact in found)
    return PDOSQuestion(text, titles, example, _A_STEP, answered, (town,), checks)


def _says_fact(line: str, fact: str | None) -> bool:
    """Whether a step names a fact, or says that its passage does not help if `fact` is None."""
    unhelpful = re.search(r"\b(?:not?|doesn['’]t|isn['’]t)\b", line.lower()) is not None
    return unhelpful if fact is None else not unhelpful and fact in line
