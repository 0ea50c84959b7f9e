"""Replay the search auto and fixed searches on recorded samples, as if each question had a deadline.

Each question has a greedy solution of each template, and samples, in folders of their own. A replay drives
the search itself with the recorded solutions in their order, and decodes nothing. The clock counts decoding steps: a
prompt takes `prompt_steps`, and a step of n samples together takes 1 + (n - 1) * row_cost. The deadlines are multiples
of the mean time of a task's greedy answer.

    M="--data rows.jsonl --model qwen2.5-coder-0.5b-instruct-q4_k_m.gguf"
    tot eval reasoning-gym:all $M --search cot --out plain
    tot eval reasoning-gym:all $M --search cot:solutions=program --out program
    tot eval reasoning-gym:all $M --search self-consistency:samples=8,solutions=program+chain --out pool
    python -m benchmarks deadlines --folder plain --folder program --folder pool
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path
from statistics import fmean
from typing import Any

from pydantic import BaseModel, Field
from rich.console import Console
from rich.table import Table

from tot.decoders.errors import OptionError
from tot.evaluation.estimate import estimate, paired, reliability
from tot.evaluation.folder import read_config
from tot.evaluation.pool import model_in, pools
from tot.llm.replies import Proposal
from tot.registry import load_task, parts_of
from tot.search.auto import Auto, samples_of
from tot.search.base import Resources
from tot.search.calibration import Calibration, calibrations_for, general, template_of
from tot.search.steps import Expand, Step
from tot.task.task import Task
from tot.tree.thought import Thought
from tot.tree.tree import Node, ThoughtTree


class Options(BaseModel):
    """Replay auto and fixed searches on recorded samples at deadlines."""

    folder: list[str] = Field(description="A folder of tot eval with whole solutions. Repeat for more.")
    calibration: str | None = Field(None, description="As for tot eval; by default the shipped one.")
    deadlines: tuple[float, ...] = Field(
        (1, 2, 4, 8, 16), description="In multiples of the mean time of a task's greedy answer."
    )
    main: float = Field(4, description="The deadline of the table by task.")
    together: int = Field(4, ge=1, description="Number of samples that auto decodes at the same time.")
    row_cost: float = Field(0.07, ge=0, description="Time of one more sample in a step, in steps of one sample.")
    prompt_steps: float = Field(25, ge=0, description="Time of a prompt, in steps of one sample.")


@dataclass(frozen=True)
class Recorded:
    """A solution and its cost."""

    thought: Thought | None
    """None for a text that could not be read."""
    key: Any
    score: float
    tokens: int


@dataclass
class Question:
    """The recorded solutions of a question, by template."""

    text: str
    kind: str
    greedy: dict[str, Recorded] = field(default_factory=dict)
    sampled: defaultdict[str, list[Recorded]] = field(default_factory=lambda: defaultdict(list))

    def scores(self) -> dict[Any, float]:
        every = [*self.greedy.values(), *(one for some in self.sampled.values() for one in some)]
        return {one.key: one.score for one in every}


@dataclass(frozen=True)
class Outcome:
    """The answer of a replayed search."""

    right: float
    """1 if the answer's score is 1, otherwise 0."""
    time: float
    tokens: int
    certainty: float | None = None


@dataclass(frozen=True)
class Clock:
    """The time of samples, in decoding steps of one sample."""

    row_cost: float
    prompt_steps: float

    def step(self, rows: int) -> float:
        return 1 + (rows - 1) * self.row_cost


def run(asked: Options, console: Console) -> None:
    """Print the tables."""
    questions, task, calibration = read([Path(one) for one in asked.folder], asked.calibration)
    clock = Clock(asked.row_cost, asked.prompt_steps)
    kinds: defaultdict[str, list[Question]] = defaultdict(list)
    for question in questions:
        kinds[question.kind].append(question)
    greedy = {kind: fmean(one.greedy["chain"].tokens for one in some) for kind, some in kinds.items()}
    auto = parts_of(task, Auto())["search"]
    ways: dict[str, Any] = {
        "greedy": [("chain", True, 1)],
        "greedy program": [("program", True, 1)],
        "4 written": [("chain", False, 4)],
        "4 programs": [("program", False, 4)],
        "1 of each": [("program", False, 1), ("chain", False, 1)],
        "2 of each": [("program", False, 2), ("chain", False, 2)],
        "4 of each": [("program", False, 4), ("chain", False, 4)],
    }
    found: dict[float, dict[str, dict[str, list[Outcome]]]] = {}
    for limit in sorted({*asked.deadlines, asked.main}):
        found[limit] = {"auto": {}, **{name: {} for name in ways}}
        for kind, some in kinds.items():
            deadline = limit * (greedy[kind] + clock.prompt_steps)
            resources = Resources(asked.together, calibrations={"generate": calibration})
            found[limit]["auto"][kind] = [replay(auto, task, one, resources, clock, deadline) for one in some]
            for name, way in ways.items():
                found[limit][name][kind] = [fixed(way, one, clock, deadline) for one in some]
    console.print(_by_deadline(found))
    console.print(_by_task(found[asked.main]))
    console.print(_calibrated(found[max(found)]["auto"]))


def read(folders: Sequence[Path], path: str | None) -> tuple[list[Question], Task, Calibration]:
    """Return the questions with greedy and sampled solutions, their task, and its calibration."""
    task = load_task(read_config(folders[0])["task"])
    questions: dict[str, Question] = {}
    for folder in folders:
        for row, drawn in pools(folder):
            about = row["reference"]
            kind = str(about.get("dataset", task.name)) if isinstance(about, Mapping) else task.name
            question = questions.setdefault(row["question"], Question(row["question"], kind))
            nodes = [node for node in _nodes(folder, row["id"]) if not node.pruned]
            records = [
                (
                    template_of(one.source),
                    Recorded(None if node is None else node.thought, one.key, one.score, one.tokens),
                )
                for one, node in zip_longest(drawn, nodes)
            ]
            if len(records) == 1:
                question.greedy.update(records)
            else:
                for name, record in records:
                    question.sampled[name].append(record)
    templates = {name for one in questions.values() for name in one.greedy}
    common = [one for one in questions.values() if one.sampled and one.greedy.keys() == templates]
    if not common:
        raise OptionError("no question has greedy and sampled solutions: evaluate the same rows in all folders")
    model = model_in(folders[0])
    known = [one for one in calibrations_for(task, path) if one.model == model]
    return common, task, next(iter(known), general())


def _nodes(folder: Path, name: str) -> Iterable[Node]:
    path = folder / "trees" / f"{name}.json"
    return list(ThoughtTree.load(path))[1:] if path.exists() else []


def replay(auto: Auto, task: Task, question: Question, resources: Resources, clock: Clock, deadline: float) -> Outcome:
    """Drive auto with the recorded solutions until it ends or the deadline passes."""
    search = auto.start(task, question.text, resources=resources)
    used: defaultdict[str, int] = defaultdict(int)
    running: dict[Step, tuple[Recorded, float]] = {}
    begun: list[tuple[Recorded, float]] = []
    now = steps_done = 0.0
    while steps := search.pending():
        running = {step: one for step, one in running.items() if step in steps}
        for step in steps:
            if step not in running:
                assert isinstance(step, Expand)
                assert step.sample is not None
                name = auto.solutions[step.sample % len(auto.solutions)]
                record = question.greedy[name] if step.count == 1 else None
                if record is None:
                    if used[name] == len(question.sampled[name]):
                        continue  # the recorded samples are spent
                    record = question.sampled[name][used[name]]
                    used[name] += 1
                running[step] = record, steps_done + record.tokens + clock.prompt_steps
                begun.append((record, steps_done))
        if not running:
            break
        first = min(running, key=lambda step: running[step][1])
        record, end = running[first]
        passed = (end - steps_done) * clock.step(len(running))
        if now + passed > deadline:
            steps_done += (deadline - now) / clock.step(len(running))
            now = deadline
            break
        now, steps_done = now + passed, end
        del running[first]
        search.tell([[Proposal(record.thought)]], executed=True, step=first)
    tokens = sum(_decoded(record, steps_done - start, clock) for record, start in begun)
    answered = [(node, answer) for node in search.complete() if (answer := search.answer_at(node)) is not None]
    ballots, winners = auto.elect(search, answered)
    if not winners:
        return Outcome(0.0, now, tokens)
    leader = ballots[winners[0]].answer
    found = resources.calibrations["generate"].probabilities(ballots, samples_of(search))
    return Outcome(float(question.scores()[leader] == 1), now, tokens, found[leader])


def _decoded(record: Recorded, steps: float, clock: Clock) -> int:
    """Return the number of tokens of a sample after a number of steps, its prompt included."""
    return round(min(max(steps - clock.prompt_steps, 0.0), record.tokens))


def fixed(way: Sequence[tuple[str, bool, int]], question: Question, clock: Clock, deadline: float) -> Outcome:
    """Return the majority's answer among the samples of a way that end before the deadline, decoded together."""
    records = [
        record
        for name, greedy, count in way
        for record in ([question.greedy[name]] if greedy else question.sampled[name][:count])
    ]
    rest = sorted(records, key=lambda one: one.tokens)
    now = done = 0.0
    ended: list[Recorded] = []
    for i, record in enumerate(rest):
        passed = (record.tokens + clock.prompt_steps - done) * clock.step(len(rest) - i)
        if now + passed > deadline:
            done += (deadline - now) / clock.step(len(rest) - i)
            now = deadline
            break
        now, done = now + passed, record.tokens + clock.prompt_steps
        ended.append(record)
    counts: defaultdict[Any, int] = defaultdict(int)
    for record in records:  # in the order of the samples: the first wins a tie
        if record.key is not None and record in ended:
            counts[record.key] += 1
    leader = max(counts, key=lambda key: counts[key], default=None)
    right = float(leader is not None and question.scores()[leader] == 1)
    return Outcome(right, now, sum(_decoded(one, done, clock) for one in records))


def _by_deadline(found: Mapping[float, Mapping[str, Mapping[str, list[Outcome]]]]) -> Table:
    """Return the share right of each search at each deadline, and the regret of auto."""
    names = list(next(iter(found.values())))
    rows = Table("deadline", *names, "regret", title="right; deadlines in greedy answers of the task")
    for limit, ways in found.items():
        rights = {name: [fmean(one.right for one in some) for some in kinds.values()] for name, kinds in ways.items()}
        best = max((name for name in names if name != "auto"), key=lambda name: fmean(rights[name]))
        regret = fmean(rights[best]) - fmean(rights["auto"])
        rows.add_row(
            f"{limit:g}", *(f"{fmean(rights[name]):.1%}" for name in names), f"{100 * regret:+.1f} points ({best})"
        )
    return rows


def _by_task(ways: Mapping[str, Mapping[str, list[Outcome]]]) -> Table:
    """Return a row for each task, with the paired difference of auto and the greedy answer."""
    names = list(ways)
    rows = Table("task", *names, "auto minus greedy")
    for kind in sorted(ways["auto"]):
        pairs = zip(ways["auto"][kind], ways["greedy"][kind], strict=True)
        cells = [f"{fmean(one.right for one in ways[name][kind]):.0%}" for name in names]
        rows.add_row(kind, *cells, paired([a.right - b.right for a, b in pairs]).format("+.0%"))
    every = {name: [one for some in kinds.values() for one in some] for name, kinds in ways.items()}
    means = [estimate([one.right for one in every[name]]).format() for name in names]
    pairs = zip(every["auto"], every["greedy"], strict=True)
    rows.add_row("all", *means, paired([a.right - b.right for a, b in pairs]).format("+.1%"))
    rows.add_row("new tokens", *(f"{fmean(one.tokens for one in every[name]):.0f}" for name in names), "")
    return rows


def _calibrated(kinds: Mapping[str, list[Outcome]]) -> Table:
    """Return the reliability of certainties at the last deadline."""
    answers = [one for some in kinds.values() for one in some if one.certainty is not None]
    measured = reliability([one.certainty for one in answers], [one.right for one in answers])
    rows = Table("answers", "calibration error", "mean certainty", "right", title="certainty at the last deadline")
    if measured is not None:
        means = fmean(one.certainty or 0.0 for one in answers), fmean(one.right for one in answers)
        rows.add_row(f"{len(answers)}", f"{measured.error:.1%}", *(f"{one:.1%}" for one in means))
    return rows
