"""Parallel steps against normal decoding: who of so many people has a GPA within a range (PDOS, Table 1, retrieval).

Each side decodes the same questions, in turns, one at a time at temperature 0; prompts are computed beforehand, so only
decoding is timed. Normal decoding is given the very prompt of the side it is compared with, instructions and all. Speed
is tokens of the finished text a second, titles among them and skeletons not, so that both sides are paid for the same.
"""

from __future__ import annotations

import random
import re
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from tot.bench.machine import describe, spread
from tot.decoders.decoder import LocalDecoder, load_decoder
from tot.decoders.engine.engine import Engine
from tot.decoders.errors import OptionError
from tot.decoders.request import Message, Request, Sampling
from tot.decoders.steps_format import PDOSOptions, StepsFormat
from tot.tree import write_json

FEWEST, MOST = 4, 100
_A_STEP, _CONCLUSION = 32, 64
"""Tokens that an answer may have: for each person, and besides."""

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


@dataclass(frozen=True)
class Question:
    """Résumés, and the range that one person's GPA is in."""

    text: str
    names: tuple[str, ...]
    answer: str

    def is_answered_by(self, text: str) -> bool:
        """Exact match: of all names it is the answer that the last line with "Name:" gives."""
        lines = re.findall(r"name\W*:(.*)", text, flags=re.IGNORECASE)
        return bool(lines) and [name for name in self.names if name in lines[-1]] == [self.answer]


def question(people: int, seed: int) -> Question:
    """A seeded question about `people` made-up people. Raises OptionError outside of 4 to 100."""
    if not FEWEST <= people <= MOST:
        raise OptionError(f"{people} people can't be asked about: choose {FEWEST} to {MOST}")
    chance = random.Random(f"{people} {seed}")
    names = chance.sample([f"{first} {family}" for first in _FIRST for family in _FAMILY], people)
    grades = chance.sample(range(150, 451, 3), people)
    rows = [
        f"{name}, {chance.randint(20, 39)}, studied {chance.choice(_SUBJECTS)} in {chance.choice(_TOWNS)}. "
        f"GPA {grade / 100:.2f}. Likes {' and '.join(chance.sample(_PASTIMES, 2))}."
        for name, grade in zip(names, grades, strict=True)
    ]
    chosen = chance.randrange(people)
    below = max((grade for grade in grades if grade < grades[chosen]), default=100)
    above = min((grade for grade in grades if grade > grades[chosen]), default=500)
    low, high = chance.randint(below + 1, grades[chosen] - 1), chance.randint(grades[chosen] + 1, above - 1)
    text = (
        f"These are the résumés of {people} people.\n\n" + "\n".join(rows) + "\n\n"
        f"Whose GPA lies between {low / 100:.2f} and {high / 100:.2f}? Look at every person in turn, with the name as "
        "the title: say what the GPA is and whether it lies between the two. Then end with a line that says "
        '"Name: " and the name.'
    )
    return Question(text, tuple(names), names[chosen])


@dataclass
class Side:
    """A way of decoding, and what was measured of it, a number a question."""

    name: str
    decoder: LocalDecoder
    given: bool
    """The steps' titles are given."""
    right: list[bool] = field(default_factory=list)
    speeds: list[float] = field(default_factory=list)
    """Tokens of the text a second."""
    seconds: list[float] = field(default_factory=list)
    inside: list[float] = field(default_factory=list)
    """Tokens a second while steps run, of questions that had steps."""
    peaks: list[float] = field(default_factory=list)
    """Most slots live at once, over those of the prompt and the finished text."""
    slots: list[int] = field(default_factory=list)
    followed: list[bool] = field(default_factory=list)
    """The model wrote a skeleton in the right format."""

    def answer(self, asked: Question, request: Request) -> None:
        engine = self.decoder.engine
        engine.accounts.clear()
        engine.call(lambda: _fresh(engine))
        began = time.perf_counter()
        (got,) = self.decoder.generate([request])
        seconds = time.perf_counter() - began
        account = engine.accounts["generate"]
        steps = sum(part.kind == "step" for part in got.parts)
        tokens = len(engine.codec.encode(got.text))
        self.right.append(asked.is_answered_by(got.text))
        self.seconds.append(seconds)
        self.speeds.append(tokens / seconds)
        self.slots.append(engine.tree.peak_live)
        self.peaks.append(engine.tree.peak_live / (got.usage.prompt_tokens + tokens))
        self.followed.append(steps > 1 and account.skeletons > account.broken == 0)
        if steps:
            self.inside.append(account.block_tokens / account.block_seconds)


def run(model: str, people: Sequence[int], rounds: int, out: Path | None, console: Console) -> None:
    """Measure, print a table for each number of people, and write the numbers to `out`."""
    for count in people:
        question(count, 0)
    with load_decoder("ar", model) as plain, load_decoder("pdos", engine=plain.engine) as steps:
        console.print(f"{model}; {describe(plain.engine.loaded.device, plain.engine.loaded.dtype)}; {rounds} questions")
        numbers: dict[str, Any] = {"machine": describe(plain.engine.loaded.device, plain.engine.loaded.dtype)}
        for count in people:
            sides = [
                Side("ar", plain, given=True),
                Side("pdos, steps given", steps, given=True),
                Side("ar, asked for a skeleton", plain, given=False),
                Side("pdos, own skeleton", steps, given=False),
            ]
            _measure(sides, StepsFormat(PDOSOptions(), plain.engine.codec), count, rounds)
            _report(sides, count, numbers, console)
        if out is not None:
            write_json(out, numbers)
            console.print(f"numbers: {out}")


def _measure(sides: Sequence[Side], form: StepsFormat, people: int, rounds: int) -> None:
    """All sides in turns at each question, in another order every time; the first question warms up."""
    sampling = Sampling(max_tokens=people * _A_STEP + _CONCLUSION)
    for number in range(rounds + 1):
        asked = question(people, number)
        for side in (*sides[number % len(sides) :], *sides[: number % len(sides)]):
            titles = asked.names if side.given else ()
            request = Request(prompt=(Message(role="user", content=asked.text),), sampling=sampling, steps=titles)
            prepared = form.prepare(request)
            engine = side.decoder.engine
            engine.call(engine.tree.clear)
            sides[0].decoder.generate([prepared.model_copy(update={"sampling": Sampling(max_tokens=1), "steps": ()})])
            if number:
                side.answer(asked, prepared if side.decoder is sides[0].decoder else request)
            else:
                side.decoder.generate([prepared if side.decoder is sides[0].decoder else request])


def _report(sides: Sequence[Side], people: int, numbers: dict[str, Any], console: Console) -> None:
    table = Table("", "right", "tokens/s", "against ar", "inside the block", "seconds", "against ar", "slots at most")
    table.add_column("of prompt and text")
    table.add_column("format kept")
    for i, side in enumerate(sides):
        base = sides[i - i % 2]
        ratio = _ratio(side.speeds, base.speeds)
        inside = _ratio(side.inside, [statistics.median(base.speeds)] * len(side.inside)) if side.inside else None
        time_ratio = _ratio(base.seconds, side.seconds)
        own = side is not base and not side.given
        numbers[f"{people} people: {side.name}"] = {
            "right": statistics.fmean(side.right),
            "speeds": side.speeds,
            "ratio": ratio,
            "inside": side.inside,
            "inside_ratio": inside,
            "seconds": side.seconds,
            "time_ratio": time_ratio,
            "slots": side.slots,
            "peaks": side.peaks,
            "format_kept": statistics.fmean(side.followed) if own else None,
        }
        table.add_row(
            side.name,
            f"{100 * statistics.fmean(side.right):.0f}%",
            spread(side.speeds),
            f"{ratio:.2f}x",
            "" if inside is None else f"{inside:.2f}x",
            spread(side.seconds),
            f"{time_ratio:.2f}x",
            spread(side.slots, 0),
            f"{statistics.median(side.peaks):.3f}",
            f"{100 * statistics.fmean(side.followed):.0f}%" if own else "",
        )
    console.print(f"retrieval, {people} people")
    console.print(table)


def _ratio(ours: Sequence[float], theirs: Sequence[float]) -> float:
    return statistics.median(a / b for a, b in zip(ours, theirs, strict=True))


def _fresh(engine: Engine) -> None:
    """Begin to look for the most slots that are live."""
    engine.tree.peak_live = engine.tree.live
