"""`tot bench pdos`: parallel steps against normal decoding, in the shape of PDOS's Table 1 (Yu et al., 2025).

All sides answer the same questions at temperature 0, one at a time and in turns, in another order at every question.
Ratios are to normal decoding, of the same prompt where it is that of chain-of-draft, and medians of the ratios at each
question. Slots are the most keys and values held at once, over those that normal decoding of the same text takes.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from tot.bench.machine import spread
from tot.bench.pdos_judge import marks
from tot.bench.pdos_sides import Side, sides
from tot.bench.pdos_tasks import Question, multi_document, planning, retrieval
from tot.decoders.decoder import load_decoder
from tot.decoders.errors import OptionError, unknown
from tot.decoders.files import write_json
from tot.decoders.local import LocalDecoder
from tot.machine import describe

TASKS = ("retrieval", "planning", "qa")
_SMALL = 10**9
"""Parameters below which a judge's marks mean little."""


@dataclass(frozen=True)
class Chosen:
    """What is measured. Raises OptionError for choices that don't go together."""

    tasks: tuple[str, ...] = ("retrieval", "planning")
    people: tuple[int, ...] = ()
    """None given are 10."""
    aspects: tuple[int, ...] = ()
    """None given are 2, 4, 6, 8 and 10."""
    data: Path | None = None
    judge: str | None = None
    """A model; None is the one that answers."""
    rounds: int = 3
    """Questions of each kind."""

    def __post_init__(self) -> None:
        for task in self.tasks:
            if task not in TASKS:
                raise OptionError(unknown("task", task, TASKS))
        for option, given, task in (
            ("people", self.people, "retrieval"),
            ("aspects", self.aspects, "planning"),
            ("data", self.data, "qa"),
        ):
            if given and task not in self.tasks:
                raise OptionError(f"--{option} is for the task {task}, which is not among --tasks: add it, or leave it")
        if "qa" in self.tasks and self.data is None:
            raise OptionError("the task qa asks about documents of yours: name their file by --data")
        if self.judge is not None and set(self.tasks) == {"retrieval"}:
            raise OptionError(f"--judge {self.judge} has nothing to judge: retrieval is right or wrong")
        for people in self.people:
            retrieval(people, 0)
        for aspects in self.aspects:
            planning(aspects, 0)


@dataclass(frozen=True)
class Kind:
    """Questions that go into one table."""

    name: str
    questions: Sequence[Question]


def kinds(chosen: Chosen, holds: Callable[[Question], bool], console: Console) -> list[Kind]:
    """The questions asked for; what `holds` refuses loses passages, which is said. Raises OptionError."""
    numbers = range(1, chosen.rounds + 1)
    found = []
    if "retrieval" in chosen.tasks:
        found += [Kind(f"retrieval, {n} people", [retrieval(n, i) for i in numbers]) for n in chosen.people or (10,)]
    if "planning" in chosen.tasks:
        found += [
            Kind(f"planning, {n} aspects", [planning(n, i) for i in numbers])
            for n in chosen.aspects or (2, 4, 6, 8, 10)
        ]
    if chosen.data is not None:
        questions, passages = multi_document(chosen.data, chosen.rounds, holds)
        cut = [f"{kept} of {there}" for kept, there in passages if kept < there]
        if cut:
            console.print(f"passages that the model's context has room for, where not for all: {', '.join(cut)}")
        found.append(Kind("multi-document QA", questions))
    return found


def run(model: str, chosen: Chosen, out: Path | None, console: Console) -> None:
    """Measure, print a table for each kind of question, and write the numbers to `out`."""
    with ExitStack() as stack:
        normal = stack.enter_context(load_decoder("ar", model))
        steps = stack.enter_context(load_decoder("pdos", engine=normal.engine, instructions=""))
        judge = normal if chosen.judge is None else stack.enter_context(load_decoder("ar", chosen.judge))
        machine = describe(normal.engine.loaded.device, normal.engine.loaded.dtype)
        console.print(f"{model}; {machine}")
        numbers: dict[str, Any] = {"model": model, "machine": machine, "judge": chosen.judge or model}
        plain, *_ = sides(normal, steps)
        for kind in kinds(chosen, lambda question: _fits(question, plain), console):
            compared = sides(normal, steps)
            _measure(compared, kind.questions)
            numbers[kind.name] = _summary(compared, kind.questions, judge)
            _show(kind, compared, numbers[kind.name], console)
        if set(chosen.tasks) != {"retrieval"} and (size := _parameters(judge)) < _SMALL:
            console.print(f"the judge has {size / 1e6:.0f}M parameters: its marks mean little, take a larger --judge")
        if out is not None:
            write_json(out, numbers)
            console.print(f"numbers: {out}")


def _fits(question: Question, normal: Side) -> bool:
    """Whether prompt and answer have room in the context; the answer twice, since prompts may hold an outline."""
    engine = normal.decoder.engine
    prompt = engine.codec.encode_prompt(normal.messages(question))
    return len(prompt) + 2 * question.tokens <= min(engine.runner.context, engine.cache.capacity)


def _measure(compared: Sequence[Side], questions: Sequence[Question]) -> None:
    """All sides in turns at each question, in another order every time; the first question warms up."""
    for side in compared:
        side.ask(questions[0])
    for number, question in enumerate(questions):
        first = number % len(compared)
        for side in (*compared[first:], *compared[:first]):
            side.answers.append(side.ask(question))


def _summary(compared: Sequence[Side], questions: Sequence[Question], judge: LocalDecoder) -> dict[str, Any]:
    """By side: its answers, what they were worth, and medians of the ratios to its base at each question."""
    by_name = {side.name: side.answers for side in compared}
    found = {}
    for side in compared:
        pairs = list(zip(side.answers, by_name[side.base], strict=True))
        blocks = [(ours.inside / theirs.speed, ours.steps) for ours, theirs in pairs if ours.inside is not None]
        checked = [(question.is_right, answer.text) for question, answer in zip(questions, side.answers, strict=True)]
        judged = [
            (question.about, question.reference, answer.text)
            for question, answer in zip(questions, side.answers, strict=True)
            if question.about is not None
        ]
        found[side.name] = {
            "answers": [asdict(answer) for answer in side.answers],
            "right": [is_right(text) for is_right, text in checked if is_right is not None],
            "marks": marks(judge, judged),
            "base": side.base,
            "ratio": statistics.median(ours.speed / theirs.speed for ours, theirs in pairs),
            "time_ratio": statistics.median(theirs.seconds / ours.seconds for ours, theirs in pairs),
            "inside_ratio": statistics.median(ratio for ratio, _ in blocks) if blocks else None,
            "inside_ratio_a_step": statistics.median(ratio / steps for ratio, steps in blocks) if blocks else None,
            "format_kept": statistics.fmean(one.kept_format for one in side.answers) if side.writes_skeletons else None,
        }
    return found


def _show(kind: Kind, compared: Sequence[Side], numbers: Mapping[str, Mapping[str, Any]], console: Console) -> None:
    titles = ("", "right", "mark", "tokens/s", "against normal", "in the block", "/ steps", "seconds", "against normal")
    table = Table(*titles, "slots", "format kept")
    for side in compared:
        of = numbers[side.name]
        table.add_row(
            side.name,
            _percent(of["right"]),
            f"{statistics.fmean(of['marks']):.2f}" if of["marks"] else "",
            spread([answer.speed for answer in side.answers]),
            f"{of['ratio']:.2f}x",
            "" if of["inside_ratio"] is None else f"{of['inside_ratio']:.2f}x",
            "" if of["inside_ratio_a_step"] is None else f"{of['inside_ratio_a_step']:.2f}x",
            f"{statistics.median(answer.seconds for answer in side.answers):.1f}",
            f"{of['time_ratio']:.2f}x",
            f"{statistics.median(answer.slots for answer in side.answers):.3f}",
            _percent([answer.kept_format for answer in side.answers]) if side.writes_skeletons else "",
        )
    console.print(f"{kind.name}, {len(kind.questions)} questions")
    console.print(table)


def _percent(values: Sequence[bool]) -> str:
    return f"{100 * statistics.fmean(values):.0f}%" if values else ""


def _parameters(decoder: LocalDecoder) -> int:
    return sum(parameter.numel() for parameter in decoder.model.parameters())
