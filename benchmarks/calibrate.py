"""Fit certainty curves (Platt, 1999) on evaluations of questions with known answers.

Votes that stop early have fewer ballots, so each question counts with all beginnings of its vote. The shipped curve:

    MIX="--search self-consistency:samples=16,weighted=true,solutions=chain+program --evaluator logprob"
    tot eval gsm8k --data train.jsonl --limit 240 $MIX --model qwen2.5-0.5b-instruct-q4_k_m.gguf --out small
    python -m benchmarks calibrate --folder small --out tot/search/certainty.json
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import BaseModel, Field
from rich.console import Console
from rich.table import Table

from benchmarks.leaves import read_leaves
from tot.cli.flags import writable
from tot.config import SearchConfig
from tot.decoders.errors import OptionError, reason
from tot.decoders.files import write_json
from tot.decoders.models.loading import open_model
from tot.evaluation.estimate import Reliability, reliability
from tot.evaluation.folder import read_config, read_samples
from tot.llm.decoders import identity_of
from tot.registry import SEARCHES, named, refuse_code
from tot.search.certainty import Curve, Features, features, to_json
from tot.search.votes import Ballot, count, source_of, votes_of
from tot.task.checked import CheckedTask
from tot.task.task import Task

MIN_QUESTIONS = 20
_FOLDS = 5
_PENALTY = 1e-3
"""Of the squared coefficients of standardised features."""
_NAMES = tuple(Features.model_fields)
_OF_VOTES = ("search", "model", "escalate", "decoder", "prompts")
"""The recorded options that votes depend on. None of them loads a decoder."""


class Options(BaseModel):
    """Fit curves for the certainty of answers on evaluations of votes, by task and model."""

    folder: list[str] = Field(description="A folder of tot eval, on rows that are not for testing. Repeat for more.")
    out: Path = Field(description="The .json file to write, for --certainty.")
    task: str | None = Field(
        None, description="The task of the folders, path/to/file.py:ClassName, if it is not an installed one."
    )


def run(asked: Options, console: Console) -> None:
    """Print how well the curves predict, and write them."""
    writable(asked.out)
    found = calibrate([Path(folder) for folder in asked.folder], asked.task)
    title = "cross-validated by question"
    table = Table("task", "model", "questions", "votes", "calibration error", "surer half", "other half", title=title)
    for curve, measured in found:
        surer, whole = (measured.score_at_coverage[share] for share in (50, 100))
        halves = f"{surer:.1%}", f"{2 * whole - surer:.1%}"
        sizes = f"{curve.questions:,}", f"{measured.samples:,}"
        table.add_row(curve.task, curve.model or "not local", *sizes, f"{measured.error:.1%}", *halves)
    console.print(table)
    write_json(asked.out, to_json([curve for curve, _ in found]))


@dataclass(frozen=True, slots=True)
class Vote:
    """A vote on a question, and the score of the answer that it elected."""

    question: str
    seen: Features
    score: float


def calibrate(folders: Sequence[Path], task: Task | type[Task] | str | None = None) -> list[tuple[Curve, Reliability]]:
    """Fit a curve for each task and model of some evaluations.

    `task` is the evaluations' task if it is not an installed one, because no code that a folder names is run.
    Returns each curve with the reliability that cross-validation by question measures. Raises OptionError for other
    folders, and for evaluations with too few questions.
    """
    votes: defaultdict[tuple[str, str | None], list[Vote]] = defaultdict(list)
    for folder in folders:
        try:
            name, model, found = read_votes(folder, task)
        except (OSError, ValueError, LookupError, TypeError) as error:
            raise OptionError(f"{folder} has no readable samples ({reason(error)}): leave it out") from None
        votes[name, model] += found
    return [(fit(found, name, model), cross_validated(found, name)) for (name, model), found in votes.items()]


def read_votes(folder: Path, task: Task | type[Task] | str | None = None) -> tuple[str, str | None, list[Vote]]:
    """Return the task's name, the model's identity, and the votes of the questions in an evaluation's folder."""
    config = read_config(folder)
    named_by_folder = {"search": config.get("search"), **({} if task else {"task": config["task"]})}
    refuse_code(named_by_folder, folder / "config.yaml")  # reading a folder must not run code
    run = SearchConfig.of(None, {name: config[name] for name in _OF_VOTES if name in config})
    suited, models = run.suited(task or config["task"]), run.model.weights
    largest = models.get("escalate", models.get("generate"))
    model = None if largest is None else identity_of(open_model(largest))
    equal = getattr(named(run.search or suited.search, SEARCHES), "aggregate", "best") == "majority"
    votes = []
    for sample in read_samples(folder):
        for ballots in _begun(folder, sample, suited, equal):
            answers, given, scores = zip(*ballots, strict=True)
            weights = [ballot.weight for ballot in given]
            keys, winners = count(CheckedTask(suited), sample["question"], answers, weights)
            seen = features([replace(ballot, answer=key) for ballot, key in zip(given, keys, strict=True)])
            votes.append(Vote(sample["question"], seen, scores[winners[0]]))
    return suited.name, model, votes


def _begun(
    folder: Path, sample: Mapping[str, Any], task: Task, equal: bool
) -> Iterator[list[tuple[Any, Ballot, float]]]:
    """Yield the beginnings of a sample's vote, as answers, ballots and scores: the first solutions of each source.

    Only the whole vote counts if solutions share thoughts.
    """
    tree, leaves = read_leaves(folder, sample, task)
    nodes = [tree[number] for number in leaves]
    weights, sources = votes_of(nodes, equal), [source_of(node) for node in nodes]
    ballots = [
        None if answer is None else (answer, Ballot("", weights[node.id], source), score)
        for node, source, (answer, score) in zip(nodes, sources, leaves.values(), strict=True)
    ]
    turns = [sources[: i + 1].count(source) for i, source in enumerate(sources)]
    most = max(turns, default=0)
    subsets = {
        tuple(i for i, turn in enumerate(turns) if turn <= size and source in (None, sources[i]))
        for size in (range(1, most + 1) if all(node.depth == 1 for node in nodes) else [most])
        for source in {None, *sources}
    }
    for subset in sorted(subsets):
        given = [ballot for i in subset if (ballot := ballots[i]) is not None]
        if len(subset) > 1 and given:
            yield given


def fit(votes: Sequence[Vote], task: str, model: str | None = None) -> Curve:
    """Fit a curve by logistic regression, with equal weight for each question and Platt's targets.

    Raises OptionError for too few questions.
    """
    from scipy.optimize import minimize

    questions = len({vote.question for vote in votes})
    if questions < MIN_QUESTIONS:
        raise OptionError(
            f"{task}, {model or 'no local model'}: {questions} questions have votes of two or more samples, but a "
            f"curve needs {MIN_QUESTIONS}: evaluate more, with a search such as self-consistency"
        )
    known = [vote.seen.weight for vote in votes if vote.seen.weight] or [1.0]
    low, high = (float(edge) for edge in np.percentile(known, (5, 95)))
    rows = np.array([[getattr(vote.seen, name) for name in _NAMES] for vote in votes])
    column = rows[:, _NAMES.index("weight")]
    column[:] = np.where(column == 0, (low + high) / 2, np.clip(column, low, high))
    counts = Counter(vote.question for vote in votes)
    share = np.array([1 / counts[vote.question] for vote in votes]) / len(counts)
    scores = np.array([vote.score for vote in votes])
    right = float(share @ scores) * questions
    targets = scores * (right + 1) / (right + 2) + (1 - scores) / (questions - right + 2)  # Platt, section 2.2
    mean, scale = rows.mean(axis=0), rows.std(axis=0)
    scale[scale < 1e-9] = np.inf  # a constant feature gets the coefficient 0
    inputs = np.column_stack([(rows - mean) / scale, np.ones(len(rows))])

    def loss(factors: np.ndarray[Any, Any]) -> tuple[float, np.ndarray[Any, Any]]:
        logits, slopes = inputs @ factors, np.append(factors[:-1], 0.0)
        error = 1 / (1 + np.exp(-logits)) - targets
        value = share @ (np.logaddexp(0, logits) - targets * logits) + _PENALTY / 2 * slopes @ slopes
        return float(value), inputs.T @ (share * error) + _PENALTY * slopes

    found = minimize(loss, np.zeros(inputs.shape[1]), jac=True).x
    factors = found[:-1] / scale
    return Curve(
        task=task,
        model=model,
        questions=questions,
        intercept=round(float(found[-1] - factors @ mean), 4),
        coefficients=Features(**{name: round(float(one), 4) for name, one in zip(_NAMES, factors, strict=True)}),
        weights=(round(low, 4), round(high, 4)),
    )


def cross_validated(votes: Sequence[Vote], task: str) -> Reliability:
    """Return the reliability of certainties from curves that were fitted on other questions."""
    places = {question: i for i, question in enumerate(dict.fromkeys(vote.question for vote in votes))}
    folds = [places[vote.question] % _FOLDS for vote in votes]
    curves = [
        fit([vote for vote, own in zip(votes, folds, strict=True) if own != fold], task) for fold in range(_FOLDS)
    ]
    certainties = [curves[fold].certainty(vote.seen) for vote, fold in zip(votes, folds, strict=True)]
    measured = reliability(certainties, [vote.score for vote in votes])
    assert measured is not None  # every vote has a certainty
    return measured
