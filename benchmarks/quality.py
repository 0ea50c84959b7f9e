"""The benchmark `quality`: compare the accuracy and cost of ways to answer, and the AUROC of evaluators.

Each way to answer is an evaluation in its own folder, which is resumed if it exists; the tables are read from there.
`tot eval --compare` prints the votes of fewer samples from these folders. `evaluators.py` measures the evaluators.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from pydantic import Field
from rich.console import Console
from rich.table import Table

from benchmarks.evaluators import judge_pieces
from benchmarks.harness import Bench
from benchmarks.leaves import read_leaves
from benchmarks.ways import WaysOptions, compared, read_options, read_ways
from tot.decoders.errors import OptionError
from tot.decoders.machine import describe
from tot.decoders.models.loading import resolve_device
from tot.decoders.request import Sampling
from tot.evaluation.config import EvaluationRun
from tot.evaluation.estimate import estimate
from tot.evaluation.folder import read_samples
from tot.evaluation.results import tokens_of
from tot.evaluation.run import run_evaluation
from tot.llm.context import scoring
from tot.llm.decoders import open_decoders
from tot.registry import EVALUATORS, named
from tot.task.task import Task


class Options(WaysOptions):
    """Compare the accuracy and cost of ways to answer, and the AUROC of evaluators."""

    way: list[str] = Field(
        [
            "plain: search=cot",
            "votes: search=self-consistency:samples=8",
            "tree: search=bfs:thoughts=2,breadth=4,aggregate=majority; evaluator=logprob",
        ],
        description="A way to answer, as 'NAME: option=value; option=value', with options of tot eval. Repeat for "
        "more; each is compared with the first.",
    )
    folder: Path = Field(
        Path("quality"), description="Folder of the evaluations, one per way; existing ones are resumed."
    )
    concurrency: int = Field(16, ge=1, description="Concurrent searches.")
    judge: str | None = Field(
        None,
        description="A model that compares each way's answers with the first way's, as 'MODEL; option=value' with "
        "options of tot eval.",
    )
    evaluators: tuple[str, ...] = Field(
        (), description="Comma-separated state evaluators to judge pieces of solutions."
    )
    judged: int = Field(
        100,
        ge=1,
        description="Questions whose solutions the evaluators judge piece by piece, from the way with most samples.",
    )


@dataclass(frozen=True)
class Answered:
    """The result of one question in one way."""

    score: float
    tokens: float
    answer: Any = None
    forwards: int | None = None
    thoughts: int = 0
    malformed: int = 0
    best: float | None = None
    """The highest score of the leaves; None without leaves."""


Answers = dict[str, Answered]
"""By question."""


def run(asked: Options, console: Console) -> None:
    """Evaluate every way and print the tables."""
    works = {name: way(asked, options) for name, options in read_ways(asked.way).items()}
    judge = None if asked.judge is None else _judge(asked, asked.judge)
    most = max(works, key=lambda name: _samples(works[name]))
    evaluators = {name: named(name, EVALUATORS) for name in asked.evaluators}
    if evaluators and _samples(works[most]) < 2:
        raise OptionError(
            "--evaluators judges pieces of several solutions per question: add a way that samples several, such as "
            "--way 'votes: search=self-consistency:samples=8'"
        )
    bench = Bench(asked, console, f"{asked.model}; {describe(resolve_device('auto'))}")
    ways: dict[str, Answers] = {}
    folders = {name: asked.folder / re.sub(r"[^\w-]+", "-", name) for name in works}
    for name, work in works.items():
        results = run_evaluation(work, folders[name], folders[name].exists())
        latency = results.seconds / results.samples
        bench.say(f"{name}: {results.score_text}, latency {latency:.1f} s, in {folders[name]}")
        ways[name] = read_answers(folders[name], work.task)
    bench.keep(ways={name: {q: asdict(one) for q, one in answers.items()} for name, answers in ways.items()})
    bench.show(table(ways))
    if judge is not None:
        bench.show(preferred(judge, ways, bench))
    if evaluators:
        judge_pieces(bench, works[most], folders[most], evaluators, asked.judged)


def way(asked: Options, options: Mapping[str, Any]) -> EvaluationRun:
    """Return the evaluation of one way. Raises OptionError for unknown options."""
    return EvaluationRun.of({**asked.rows, "concurrency": asked.concurrency, **options})


def _judge(asked: Options, text: str) -> EvaluationRun:
    model, _, options = text.partition(";")
    problem = f"--judge {text!r} can't be read: write 'MODEL; option=value"
    return way(asked, {"model": model.strip(), **read_options(options, problem)})


def _samples(work: EvaluationRun) -> int:
    """Return the number of solutions per question that a way samples, or the breadth of its search."""
    return int(getattr(work.parts["search"], "samples", getattr(work.parts["search"], "breadth", 1)))


def read_answers(folder: Path, task: Task) -> Answers:
    """Read the result of each question from an evaluation's folder. Of repeats, the last counts."""
    return {sample["question"]: _answered(folder, sample, task) for sample in read_samples(folder)}


def _answered(folder: Path, sample: Mapping[str, Any], task: Task) -> Answered:
    _, leaves = read_leaves(folder, sample, task)
    return Answered(
        sample["score"],
        tokens_of(sample),
        sample["answer"],
        sample["measured"]["forwards"],
        sample["thoughts"],
        sample["unreadable"],
        max((score for _, score in leaves.values()), default=None),
    )


def table(ways: Mapping[str, Answers]) -> Table:
    """Build a table with one row per way: accuracy, paired difference to the first way, and cost."""
    graded = any(one.score not in (0, 1) for answers in ways.values() for one in answers.values())
    head = ["right", f"minus {next(iter(ways))}", *["wholly right"] * graded, "new tokens", "forwards"]
    head += ["a right one among the leaves", "malformed thoughts"]
    rows = Table("", *head, title="with 95% intervals; differences question by question")
    scores = {name: {text: one.score for text, one in answers.items()} for name, answers in ways.items()}
    for (name, answers), right in zip(ways.items(), compared(scores), strict=True):
        every = answers.values()
        thoughts, malformed = sum(one.thoughts for one in every), sum(one.malformed for one in every)
        best_scores = [one.best for one in every if one.best is not None]
        forwards = [one.forwards for one in every if one.forwards is not None]
        rows.add_row(
            name,
            *right,
            *[estimate([float(one.score == 1) for one in every]).format()] * graded,
            f"{fmean(one.tokens for one in every):.0f}",
            f"{fmean(forwards):.0f}" if len(forwards) == len(answers) else "",
            f"{fmean(best_scores):.1%}" if len(best_scores) == len(answers) else "",
            f"{malformed / (thoughts + malformed):.1%}" if thoughts else "",
        )
    return rows


def preferred(judge: EvaluationRun, ways: Mapping[str, Answers], bench: Bench) -> Table:
    """Build a table of how often a model prefers each way's answers to the first way's, with the task's vote prompt.

    Each pair is judged in both orders and the margins are added, since a judge may favour a position. Equal answers
    count half. A missing answer is shown as "(none)".
    """
    (first, of_first), *others = ways.items()
    heads = [f"preferred to {first}", "pairs that it orders so in either order"]
    rows, task = Table("", *heads, title=f"judge: {judge.config.to_json()['model']}"), judge.task
    with ExitStack() as stack:
        decoder = open_decoders(judge.config.model, stack)["evaluate"]
        for name, answers in others:
            pairs = {question: (one.answer, of_first[question].answer) for question, one in answers.items()}
            pairs = {question: pair for question, pair in pairs.items() if pair != (None, None)}
            prompts = [
                task.prompt("vote", task.start(question), candidates=["(none)" if a is None else str(a) for a in order])
                for question, pair in pairs.items()
                for order in (pair, pair[::-1])
            ]
            completions = decoder.generate([scoring(prompt, ("1", "2"), Sampling()) for prompt in prompts])
            margins = [one.choice_logprobs[0].total - one.choice_logprobs[1].total for one in completions]
            both = list(zip(margins[::2], (-margin for margin in margins[1::2]), strict=True))
            wins = [
                0.5 if ours == theirs else float(a + b > 0)
                for (a, b), (ours, theirs) in zip(both, pairs.values(), strict=True)
            ]
            agreed = sum((a > 0) == (b > 0) for a, b in both)
            bench.keep(**{f"{name} preferred": dict(zip(pairs, wins, strict=True))})
            rows.add_row(name, estimate(wins).format() if wins else "", f"{agreed} of {len(wins)}")
    return rows
