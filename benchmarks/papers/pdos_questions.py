"""The questions of PDOS's Table 1: retrieval, planning over aspects, answers from several documents (section 4.2).

Each question asks for independent steps and a conclusion, and has one worked example that shows the format to small
models. People, topics, aspects and documents are generated from a seed and the words in `prompts/pdos`. Documents can
also come from a file.
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
from tot.decoders.methods.pdos.steps_format import StepsFormat
from tot.evaluation.data import rows

_A_STEP, _AN_ASPECT, _CONCLUSION = 32, 64, 64
"""Maximum tokens of an answer: per step, per step of a plan, and for the conclusion."""
_NO_HELP = ("It does not help.", "no help")
"""The step, and its draft, of a passage that does not help."""
_ITEM = re.compile(r"^[ \t]*(?:[-*•]|\(?\d{1,3}[.)])[ \t]+(\S.*?)[ \t]*$", re.MULTILINE)
_DATA = json.loads((files("tot.prompts") / "pdos" / "questions.json").read_text(encoding="utf-8"))


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

    def in_steps(self, form: StepsFormat, drafts: bool = False) -> str:
        """Return the answer in the format of steps, or of their drafts."""
        steps = [f"{form.header(title)} {draft if drafts else whole}\n" for title, whole, draft in self.steps]
        return "".join(steps) + form.end_text + self.conclusion


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
    """Whether an answer is right; None if that cannot be checked."""
    about: str | None = None
    """The question as a judge sees it; None if the answer needs no judge."""
    reference: str | None = None
    right_steps: Callable[[str], float] | None = None
    """Share of an answer's steps that are right; None if that cannot be checked."""
    answered: Example | None = None
    """The question with a right answer, if it is known."""

    @property
    def tokens(self) -> int:
        """Maximum tokens of an answer."""
        return len(self.titles) * self.step_tokens + _CONCLUSION


def _example(text: str, example: Mapping[str, Any]) -> Example:
    title_whole_draft = tuple((title, whole, draft) for title, whole, draft in example["steps"])
    return Example(text, title_whole_draft, example["conclusion"], example["last"])


def _who(people: Sequence[str], low: str, high: str) -> str:
    return (
        f"These are the résumés of {len(people)} people.\n\n" + "\n".join(people) + "\n\n"
        f"Whose GPA lies between {low} and {high}? Look at every person in turn, with the name as the title: say what "
        "the GPA is and whether it lies between the two, yes or no. Then end with a line that says "
        '"Name: " and the name.'
    )


def retrieval(people: int, seed: int) -> PDOSQuestion:
    """Ask which of 4 to 100 generated `people` has a GPA within a range."""
    data = _DATA["retrieval"]
    words, demonstration = {kind: line.split() for kind, line in data["words"].items()}, data["example"]
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
    steps = {name: (grade / 100, name == names[chosen]) for name, grade in zip(names, grades, strict=True)}
    example = _example(_who(demonstration["people"], demonstration["low"], demonstration["high"]), demonstration)
    answer = tuple((name, *_compared(grade, low, high)) for name, grade in zip(names, grades, strict=True))
    answered = Example(text, answer, f"Name: {names[chosen]}", example.last)
    right_steps = partial(right_share, steps=steps)
    return PDOSQuestion(text, tuple(names), example, _A_STEP, right, None, names[chosen], right_steps, answered)


def _compared(grade: int, low: int, high: int) -> tuple[str, str]:
    """Return a right step about a GPA, and its draft."""
    number = f"{grade / 100:.2f}"
    if low < grade < high:
        return f"The GPA is {number}, which is between the two, so yes.", f"{number}, yes"
    where = f"below {low / 100:.2f}" if grade < low else f"above {high / 100:.2f}"
    return f"The GPA is {number}, which is {where}, so no.", f"{number}, no"


def names_only(text: str, name: str, names: Sequence[str]) -> bool:
    """Exact match: the last line with "Name:" contains `name` and no other of `names`."""
    last = _after("name", text)
    return last is not None and [one for one in names if one in last] == [name]


def right_share(text: str, steps: Mapping[str, tuple[float, bool]]) -> float:
    """Return the share of the people whose step states their GPA and whether it lies in the range, as yes or no.

    `steps` has both by name. Of a repeated step the last one counts, and of a step its first line.
    """
    right = 0
    for name, (grade, inside) in steps.items():
        line = (re.findall(rf"{re.escape(name)}\W*:\W*(.*)", text) or [""])[-1]
        verdicts = re.findall(r"\b(?:yes|no)\b", line.lower())
        right += grade in map(float, re.findall(r"\d+\.\d+", line)) and verdicts[-1:] == ["yes" if inside else "no"]
    return right / len(steps)


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
    demonstration = data["example"]
    example = _example(_plan(demonstration["topic"], demonstration["aspects"]), demonstration)
    return PDOSQuestion(text, chosen, example, _AN_ASPECT, about=text)


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
    words = {kind: line.split() for data in ("retrieval", "documents") for kind, line in _DATA[data]["words"].items()}
    chance = random.Random(f"documents {passages} {seed}")
    pairs = (passages + 1) // 2
    films = chance.sample([f"The {color} {thing}" for color in words["color"] for thing in words["thing"]], pairs)
    names = chance.sample([f"{first} {family}" for first in words["first"] for family in words["family"]], pairs)
    births = [chance.sample(words["town"], 2) for _ in names]
    directed = [
        (f"{film} is a film of {chance.randint(1950, 2009)}. It was directed by {name}.", name)
        for film, name in zip(films, names, strict=True)
    ]
    born = [
        (f"{name} was a director, born in {birth}, who died in {death}.", birth)
        for name, (birth, death) in zip(names, births, strict=True)
    ]
    helpful = [directed[0], born[0]]
    shuffled = [*helpful, *chance.sample([*directed[1:], *born[1:]], passages - 2)]
    chance.shuffle(shuffled)
    titles = tuple(f"Passage {number}" for number in range(1, passages + 1))
    needed = {title: one[1] if one in helpful else None for title, one in zip(titles, shuffled, strict=True)}
    asked = f"Where was the director of {films[0]} born?"
    right, steps = partial(contains, answers=births[0][:1]), partial(right_passages, needed=needed)
    text, example = _read_on([text for text, _ in shuffled], asked), _documents_example()
    helps = {
        directed[0]: (f"It says that {names[0]} directed {films[0]}.", f"director: {names[0]}"),
        born[0]: (f"It says that {names[0]} was born in {births[0][0]}.", f"{names[0]} born in {births[0][0]}"),
    }
    answer = ((title, *helps.get(one, _NO_HELP)) for title, one in zip(titles, shuffled, strict=True))
    answered = Example(text, tuple(answer), f"Answer: {births[0][0]}", example.last)
    return PDOSQuestion(text, titles, example, _A_STEP, right, None, births[0][0], steps, answered)


def right_passages(text: str, needed: Mapping[str, str | None]) -> float:
    """Return the share of the passages whose step names the needed fact, or says that the passage does not help.

    `needed` has the fact by title; None if the passage does not help.
    """
    right = 0
    for title, fact in needed.items():
        line = (re.findall(rf"{re.escape(title)}\W*:\W*(.*)", text) or [""])[-1]
        unhelpful = re.search(r"\b(?:not?|doesn['’]t|isn['’]t)\b", line.lower()) is not None
        right += unhelpful if fact is None else not unhelpful and fact in line
    return right / len(needed)


def _documents_example() -> Example:
    demonstration = _DATA["documents"]["example"]
    return _example(_read_on(demonstration["passages"], demonstration["asked"]), demonstration)


def multi_document(
    path: Path, count: int, holds: Callable[[PDOSQuestion], bool]
) -> tuple[list[PDOSQuestion], list[tuple[int, int]]]:
    """Return the first `count` questions of a file in the format of LongBench's 2WikiMultihopQA.

    A question keeps its longest prefix of passages that `holds` accepts. The second list has, by question, the numbers
    of passages kept and of all passages. Raises OptionError for an invalid row or if not even one passage fits.
    """
    questions: list[PDOSQuestion] = []
    lengths = []
    example = _documents_example()
    for number, row in enumerate(islice(rows(path), count)):
        fields = validated(_Row, row, f"{path}, row {number} of 2WikiMultihopQA's format")
        passages = fields.passages
        for length in range(len(passages), 0, -1):
            titles = tuple(f"Passage {i}" for i in range(1, length + 1))
            text, right = _read_on(passages[:length], fields.input), partial(contains, answers=fields.answers)
            question = PDOSQuestion(text, titles, example, _A_STEP, right, fields.input, fields.answers[0])
            if holds(question):
                break
        else:
            raise OptionError(
                f"{path}, row {number}: its first passage alone is longer than the model's context: choose a model "
                "with a longer context"
            )
        lengths.append((length, len(passages)))
        questions.append(question)
    if not questions:
        raise OptionError(f"{path} has no rows: give a file with questions")
    return questions, lengths


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
    """Whether the last line with "Answer:" contains one of `answers`, ignoring case and punctuation."""
    last = _after("answer", text)
    return last is not None and any(f" {_normal(answer)} " in f" {_normal(last)} " for answer in answers)


def _normal(text: str) -> str:
    words = text.lower().translate(str.maketrans(string.punctuation, " " * len(string.punctuation)))
    return " ".join(words.split())


def _after(label: str, text: str) -> str | None:
    """Return the text after the label and a colon, in the last line that has both; None if no line has."""
    lines = re.findall(rf"{label}\W*:(.*)", text, flags=re.IGNORECASE)
    return str(lines[-1]) if lines else None
