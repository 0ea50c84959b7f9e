"""The benchmark `quality`: compare the accuracy and cost of ways to answer, and the AUROC of evaluators.

Each way to answer is an evaluation in its own folder, which is resumed if it exists; the tables are read from there.
If a way sampled several solutions per question, smaller sample counts and other selection rules are replayed without
decoding. `evaluators.py` measures the evaluators.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from itertools import zip_longest
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
from tot.evaluators.heuristic import LogProb
from tot.llm.context import scoring
from tot.llm.decoders import open_decoders
from tot.registry import EVALUATORS, named
from tot.search.votes import count
from tot.task.checked import CheckedTask
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
    mix: list[str] = Field([], description="Ways whose interleaved solutions also vote together: 'votes+programs'.")
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
class Leaf:
    """A complete solution: its answer, its score and its possible voting weights."""

    answer: Any
    right: float
    probability: float | None
    """Mean probability per token, as sampled: the weight of `weighted=true`."""
    tokens: int


@dataclass(frozen=True)
class Answered:
    """The result of one question in one way."""

    score: float
    tokens: float
    answer: Any = None
    forwards: int | None = None
    thoughts: int = 0
    malformed: int = 0
    leaves: tuple[Leaf, ...] = ()


Answers = dict[str, Answered]
"""By question."""


def run(asked: Options, console: Console) -> None:
    """Evaluate every way and print the tables."""
    works = {name: way(asked, options) for name, options in read_ways(asked.way).items()}
    mixtures = {text: [name.strip() for name in text.split("+")] for text in asked.mix}
    for text, names in mixtures.items():
        if len(names) < 2 or not works.keys() >= set(names):
            raise OptionError(f"--mix {text!r} can't be read: join ways with +, such as {'+'.join(works)}")
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
        answers = read_answers(folders[name], work.task)
        ways |= {name: answers, **replayed(name, answers, work.task)}
    for mixture, names in mixtures.items():
        ways |= replayed(mixture, mixed([ways[name] for name in names]), works[names[0]].task)
    bench.keep(ways={name: {q: asdict(one) for q, one in answers.items()} for name, answers in ways.items()})
    bench.show(table(ways))
    if judge is not None:
        bench.show(preferred(judge, {name: ways[name] for name in works}, bench))
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
    leaves: list[Leaf] = []
    tree, scored_answers = read_leaves(folder, sample, task)
    for node, (answer, right) in scored_answers.items():
        state = tree.state(tree[node])
        tokens = sum(len(part.tokens) for thought in state.thoughts for part in thought.drawn.values())
        leaves.append(Leaf(answer, right, LogProb().of(state), tokens))
    return Answered(
        sample["score"],
        tokens_of(sample),
        sample["answer"],
        sample["measured"]["forwards"],
        sample["thoughts"],
        sample["unreadable"],
        tuple(leaves),
    )


# -- replays ------------------------------------------------------------------------------------------------------

CHOOSING: dict[str, Callable[[Leaf], float | None]] = {
    "majority": lambda leaf: 1.0,
    "weighted by probability": lambda leaf: leaf.probability,
}


def replayed(name: str, answers: Answers, task: Task) -> dict[str, Answers]:
    """Return the answers chosen from each question's solutions by every applicable rule.

    If the solutions were sampled independently, smaller numbers of samples are replayed as well.
    """
    flat = all(one.thoughts == len(one.leaves) for one in answers.values())
    counts = [len(one.leaves) for one in answers.values()]
    most = min(counts, default=0) if flat else 0
    sizes: list[int | None] = [size for size in (2, 4, 8, 12, 16, 32, 64) if size < most]
    sizes += [most] * (most > 1) if flat else [None] * (max(counts) > 1)
    replays: dict[str, Answers] = {}
    for size in sizes:
        for rule, weigh in CHOOSING.items():
            if any(weigh(leaf) is None for one in answers.values() for leaf in one.leaves[:size]):
                continue
            chosen = {question: _chosen(question, one.leaves[:size], weigh, task) for question, one in answers.items()}
            if size is None:  # branches share tokens
                chosen = {question: replace(one, tokens=answers[question].tokens) for question, one in chosen.items()}
            replays[f"{name}, {rule} of {size or 'all'}"] = chosen
    return replays


def mixed(ways: Sequence[Answers]) -> Answers:
    """Interleave the solutions of several ways, for the questions that all of them have."""
    answers: Answers = {}
    for question in (text for text in ways[0] if all(text in way for way in ways)):
        turns = zip_longest(*(way[question].leaves for way in ways))
        leaves = tuple(leaf for turn in turns for leaf in turn if leaf is not None)
        answers[question] = Answered(0.0, 0.0, thoughts=len(leaves), leaves=leaves)
    return answers


def _chosen(question: str, leaves: Sequence[Leaf], weigh: Callable[[Leaf], float | None], task: Task) -> Answered:
    """Return the answer with the largest sum of weights."""
    answered = [leaf for leaf in leaves if leaf.answer is not None]
    weights = [weigh(leaf) or 0.0 for leaf in answered]
    winners = count(CheckedTask(task), question, [leaf.answer for leaf in answered], weights)[1]
    best = answered[winners[0]] if winners else Leaf(None, 0.0, None, 0)
    return Answered(best.right, sum(leaf.tokens for leaf in leaves), best.answer, leaves=tuple(leaves))


# -- tables -------------------------------------------------------------------------------------------------------


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
        best_scores = [max(leaf.right for leaf in one.leaves) for one in every if one.leaves]
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
