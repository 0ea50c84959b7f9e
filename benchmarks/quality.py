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
from functools import partial
from itertools import zip_longest
from pathlib import Path
from statistics import fmean
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.evaluators import judge
from benchmarks.harness import SECONDS, Bench, Measured, Metric, Side, duration, plain, timed
from benchmarks.options import QualityOptions
from tot.api import asolve
from tot.decoders.errors import OptionError
from tot.decoders.machine import describe
from tot.decoders.models.loading import resolve_device
from tot.decoders.request import Request, Sampling
from tot.evaluation.estimate import estimate, paired
from tot.evaluation.folder import read_leaves, read_samples
from tot.evaluation.options import EvaluationRun
from tot.evaluation.questions import Question, Questions
from tot.evaluation.results import tokens_of
from tot.evaluation.run import run_evaluation
from tot.evaluators.heuristic import LogProb
from tot.llm.prefix import scoring
from tot.registry import EVALUATORS, named
from tot.running import run_to_end
from tot.search.votes import Ballot, count, elected, stays_ahead
from tot.task.checked import CheckedTask
from tot.task.task import Task


@dataclass(frozen=True)
class Leaf:
    """A complete solution: its answer, its score and its possible voting weights."""

    answer: Any
    right: float
    value: float | None
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


def run(asked: QualityOptions, console: Console) -> None:
    """Evaluate every way and print the tables."""
    works, mixtures = {name: way(asked, options) for name, options in asked.ways.items()}, asked.mixed
    judge_of_pairs = None if asked.judge is None else way(asked, asked.judging)
    most = max(works, key=lambda name: _samples(works[name]))
    evaluators = {name: named(name, EVALUATORS) for name in asked.evaluators}
    if evaluators and _samples(works[most]) < 2:
        raise OptionError(
            "--evaluators judges pieces of several solutions per question: add a way that samples several, such as "
            "--way 'votes: search=self-consistency:samples=8'"
        )
    bench = Bench(asked, console, f"{asked.model}; {describe(resolve_device('auto'))}")
    bench.say(forecast(works))
    if note := prompts_told(works):
        bench.say(note)
    ways: dict[str, Answers] = {}
    for name, work in works.items():
        folder = folder_of(asked, name)
        results = run_evaluation(work, folder, folder.exists())
        bench.say(f"{name}: {results.score_text}, latency {results.seconds / results.samples:.1f} s, in {folder}")
        answers = read_answers(folder, work.task)
        ways |= {name: answers, **replayed(name, answers, work.task)}
    for mixture, names in mixtures.items():
        ways |= replayed(mixture, mixed([ways[name] for name in names]), works[names[0]].task)
    bench.keep(ways={name: {q: asdict(one) for q, one in answers.items()} for name, answers in ways.items()})
    bench.show(table(ways))
    if judge_of_pairs is not None:
        bench.show(preferred(judge_of_pairs, {name: ways[name] for name in works}, bench))
    if evaluators:
        judge(bench, works[most], folder_of(asked, most), evaluators, asked.judged)
    if asked.timed:
        time_each(asked, works, bench)


def way(asked: QualityOptions, options: Mapping[str, Any]) -> EvaluationRun:
    """Return the evaluation of one way. Raises OptionError for unknown options."""
    return EvaluationRun.read({**asked.rows, "concurrency": asked.concurrency, **options})


def folder_of(asked: QualityOptions, name: str) -> Path:
    """Return the folder of a way's evaluation."""
    return asked.folder / re.sub(r"[^\w-]+", "-", name)


def _samples(work: EvaluationRun) -> int:
    """Return the number of solutions per question that a way samples, or the breadth of its search."""
    return int(getattr(work.parts["search"], "samples", getattr(work.parts["search"], "breadth", 1)))


def forecast(works: Mapping[str, EvaluationRun]) -> str:
    """Estimate how long the evaluations will take, from the time that sixteen short texts take now."""
    model_works = [work for work in works.values() if work.config.model is not None]
    if not model_works:
        return f"{len(works)} ways without a model"
    first = model_works[0]
    requests = [Request(prompt=f"Question {i}.", sampling=Sampling(max_tokens=16, ignore_eos=True)) for i in range(16)]
    with ExitStack() as stack:
        decoder = first.config.open(stack)["generate"]
        seconds, _ = timed(lambda: decoder.generate(requests))
    texts = sum(map(_samples, model_works))
    tokens = first.task.sampling.get(first.task.chain, {}).get("max_tokens", 128) / 2
    questions = first.options.limit or 1
    expected = duration(questions * texts * tokens * seconds / 256)
    return f"about {expected} for {questions} questions and {len(works)} ways, more with tree searches"


def prompts_told(works: Mapping[str, EvaluationRun]) -> str:
    """Report the prompts of each way if they differ.

    A way's search and decoder choose the prompts unless its options name them.
    """
    if len({work.task.prompts for work in works.values()}) < 2:
        return ""
    prompts = ", ".join(f"{name} {work.task.prompts}" for name, work in works.items())
    return f"prompts differ: {prompts} (set prompts=chat or prompts=papers in a way)"


# -- ways to answer -----------------------------------------------------------------------------------------------


def read_answers(folder: Path, task: Task) -> Answers:
    """Read the result of each question from an evaluation's folder. Of repeats, the last counts."""
    return {sample["question"]: _answered(folder, sample, task) for sample in read_samples(folder)}


def _answered(folder: Path, sample: Mapping[str, Any], task: Task) -> Answered:
    leaves: list[Leaf] = []
    tree, scored_answers = read_leaves(folder, sample, task)
    for node, (answer, right) in scored_answers.items():
        state = tree.state(tree[node])
        tokens = sum(len(part.tokens) for thought in state.thoughts for part in thought.drawn.values())
        leaves.append(Leaf(answer, right, tree[node].value, LogProb().of(state), tokens))
    return Answered(
        sample["score"],
        tokens_of(sample),
        sample["answer"],
        sample["measured"]["forwards"],
        sample["thoughts"],
        sample["unreadable"],
        tuple(leaves),
    )


CHOOSING: dict[str, Callable[[Leaf], float | None]] = {
    "majority": lambda leaf: 1.0,
    "weighted by probability": lambda leaf: leaf.probability,
    "weighted by value": lambda leaf: leaf.value,
    "best value": lambda leaf: leaf.value,
}
SURE = 0.95
"""The replayed `until` of a vote weighted by probability."""


def replayed(name: str, answers: Answers, task: Task) -> dict[str, Answers]:
    """Return the answers chosen from each question's solutions by every applicable rule.

    If the solutions were sampled independently, smaller numbers of samples are replayed as well.
    """
    flat = all(one.thoughts == len(one.leaves) for one in answers.values())
    counts = [len(one.leaves) for one in answers.values()]
    most = min(counts, default=0) if flat else 0
    sizes: list[int | None] = [size for size in (2, 4, 8, 12, 16, 32, 64) if size < most]
    sizes += [most] * (most > 1) if flat else [None] * (max(counts) > 1)
    ways = dict(CHOOSING)
    if all(leaf.value == leaf.probability for one in answers.values() for leaf in one.leaves):
        del ways["weighted by value"]  # identical
    probable = all(leaf.probability is not None for one in answers.values() for leaf in one.leaves)
    replays: dict[str, Answers] = {}
    for size in sizes:
        for rule, weigh in ways.items():
            leaves_by_question = {question: one.leaves[:size] for question, one in answers.items()}
            if all(weigh(leaf) is not None for leaves in leaves_by_question.values() for leaf in leaves):
                vote = rule != "best value"
                chosen = {
                    question: _chosen(question, leaves, weigh, task, vote)
                    for question, leaves in leaves_by_question.items()
                }
                if size is None:  # branches share tokens
                    chosen = {
                        question: replace(one, tokens=answers[question].tokens) for question, one in chosen.items()
                    }
                replays[f"{name}, {rule} of {size or 'all'}"] = chosen
        if probable and size is not None and size > 2:
            replays[f"{name}, until {SURE} of at most {size}"] = {
                question: _until_sure(question, one.leaves[:size], task) for question, one in answers.items()
            }
    return replays


def mixed(ways: Sequence[Answers]) -> Answers:
    """Interleave the solutions of several ways, for the questions that all of them have."""
    answers: Answers = {}
    for question in (text for text in ways[0] if all(text in way for way in ways)):
        turns = zip_longest(*(way[question].leaves for way in ways))
        leaves = tuple(leaf for turn in turns for leaf in turn if leaf is not None)
        answers[question] = Answered(0.0, 0.0, thoughts=len(leaves), leaves=leaves)
    return answers


def _chosen(
    question: str, leaves: Sequence[Leaf], weigh: Callable[[Leaf], float | None], task: Task, vote: bool
) -> Answered:
    """Return the answer with the largest sum of weights if `vote`, otherwise the answer of the best leaf."""
    answered = [leaf for leaf in leaves if leaf.answer is not None]
    weights = [weigh(leaf) or 0.0 for leaf in answered]
    if vote:
        winners = count(CheckedTask(task), question, [leaf.answer for leaf in answered], weights)[1]
    else:
        winners = elected(range(len(answered)), weights)
    best = answered[winners[0]] if winners else Leaf(None, 0.0, None, None, 0)
    return Answered(best.right, sum(leaf.tokens for leaf in leaves), best.answer, leaves=tuple(leaves))


def _until_sure(question: str, leaves: Sequence[Leaf], task: Task) -> Answered:
    """Return the vote of the first leaves that are enough to be sure, as if they had been sampled one by one."""
    for used in range(2, len(leaves) + 1):
        answered = [leaf for leaf in leaves[:used] if leaf.answer is not None]
        weights = [leaf.probability or 0.0 for leaf in answered]
        keys, _ = count(CheckedTask(task), question, [leaf.answer for leaf in answered], weights)
        if len(keys) > 1 and stays_ahead([*map(Ballot, keys, weights)], len(leaves) - used) >= SURE:
            break
    return _chosen(question, leaves[:used], CHOOSING["weighted by probability"], task, vote=True)


def table(ways: Mapping[str, Answers]) -> Table:
    """Build a table with one row per way: accuracy, paired difference to the first way, and cost."""
    first = next(iter(ways))
    graded = any(one.score not in (0, 1) for answers in ways.values() for one in answers.values())
    head = ["right", *["wholly right"] * graded, f"minus {first}", "new tokens", "forwards"]
    head += ["a right one among the leaves", "malformed thoughts"]
    rows = Table("", *head, title="with 95% intervals; differences question by question")
    for name, answers in ways.items():
        common = [question for question in answers if question in ways[first]]
        differences = [answers[question].score - ways[first][question].score for question in common]
        thoughts = sum(one.thoughts for one in answers.values())
        malformed = sum(one.malformed for one in answers.values())
        best_scores = [max(leaf.right for leaf in one.leaves) for one in answers.values() if one.leaves]
        rows.add_row(
            name,
            estimate([one.score for one in answers.values()]).format(),
            *[estimate([float(one.score == 1) for one in answers.values()]).format()] * graded,
            "" if name == first or not differences else paired(differences).format("+.1%"),
            f"{_mean(answers, 'tokens'):.0f}",
            f"{_mean(answers, 'forwards'):.0f}" if all(one.forwards is not None for one in answers.values()) else "",
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
    rows = Table(
        "",
        f"preferred to {first}",
        "pairs that it orders so in either order",
        title=f"judge: {judge.config.model}",
    )
    task = judge.task
    with ExitStack() as stack:
        decoder = judge.config.open(stack)["evaluate"]
        for name, answers in others:
            pairs = {question: (one.answer, of_first[question].answer) for question, one in answers.items()}
            pairs = {question: pair for question, pair in pairs.items() if pair != (None, None)}
            prompts = [
                task.prompt(task.vote, task.start(question), candidates=[_text_of(one) for one in order])
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
            rows.add_row(name, estimate(wins).format(), f"{agreed} of {len(wins)}")
    return rows


def _text_of(answer: Any) -> str:
    return "(none)" if answer is None else str(answer)


def _mean(answers: Answers, field: str) -> float:
    return fmean(getattr(one, field) for one in answers.values())


def time_each(asked: QualityOptions, works: Mapping[str, EvaluationRun], bench: Bench) -> None:
    """Measure seconds per question of each way, one question at a time; the ways take turns."""
    first = next(iter(works.values()))
    asked_questions = [
        one for one in Questions(first.task, first.options.data, asked.timed, asked.offset) if isinstance(one, Question)
    ]

    def answered(work: EvaluationRun, question: str) -> Measured:
        seconds, solution = timed(lambda: run_to_end(asolve(work.task, question, work.config)))
        return {"seconds": seconds, "tokens": solution.usage.new_tokens}

    sides = [Side(name, partial(answered, work)) for name, work in works.items()]
    bench.compare(
        f"{len(asked_questions)} questions, one at a time",
        sides,
        lambda _, turn: asked_questions[turn].text,
        rounds=len(asked_questions),
        warm_up=lambda _: asked_questions[0].text,
        metrics=[SECONDS, Metric("new tokens", lambda measured: measured["tokens"], plain(".0f"))],
        against=[sides[0].name],
    )
