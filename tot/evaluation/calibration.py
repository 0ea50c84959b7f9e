"""Fit certainty curves (Platt, 1999) on evaluations of questions with known answers.

Votes that stop early have fewer ballots, so each question counts with all beginnings of its vote. The shipped curves:

    MIX="--search self-consistency:samples=16,weighted=true,solutions=chain+program --evaluator logprob"
    tot eval gsm8k --data train.jsonl --limit 240 $MIX --model qwen2.5-0.5b-instruct-q4_k_m.gguf --out small
    tot eval gsm8k --data train.jsonl --limit 160 $MIX --model qwen2.5-1.5b-instruct-q4_k_m.gguf --out large
    tot calibrate small large --generic --out tot/search/certainty.json
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tot.decoders.errors import OptionError, reason
from tot.decoders.models.loading import open_model
from tot.evaluation.folder import read_config, read_samples
from tot.evaluation.leaves import read_leaves
from tot.evaluation.options import EvaluationRun
from tot.evaluation.reliability import Reliability, reliability
from tot.llm.family import family_of
from tot.search.certainty import Curve, Features, features
from tot.search.votes import Ballot, elected, source_of, votes_of
from tot.task.task import Task

MIN_QUESTIONS = 20
_FOLDS = 5
_PENALTY = 1e-3
"""Of the squared coefficients of standardised features."""
_NAMES = tuple(Features.model_fields)


@dataclass(frozen=True, slots=True)
class Vote:
    """A vote on a question, and the score of the answer that it elected."""

    question: str
    model: str | None
    seen: Features
    score: float


def calibrate(folders: Sequence[Path], generic: bool = False) -> list[tuple[Curve, Reliability]]:
    """Fit a curve for each task and model of some evaluations, and with `generic` one for all others.

    Returns each curve with the reliability that cross-validation by question measures. Raises OptionError for other
    folders, and for evaluations with too few questions.
    """
    votes: defaultdict[tuple[str | None, str | None], list[Vote]] = defaultdict(list)
    for folder in folders:
        try:
            task, model, found = read_votes(folder)
        except (OSError, ValueError, LookupError, TypeError) as error:
            raise OptionError(f"{folder} has no readable samples ({reason(error)}): leave it out") from None
        votes[task, model] += found
    if generic:
        votes[None, None] = [vote for found in votes.values() for vote in found]
    return [(fit(found, task, model), cross_validated(found)) for (task, model), found in votes.items()]


def read_votes(folder: Path) -> tuple[str, str | None, list[Vote]]:
    """Return the task's name, the model's family, and the votes of the questions in an evaluation's folder."""
    config = read_config(folder)
    config.pop("record", None)
    run = EvaluationRun.read(config)
    weights = run.config.weights
    largest = weights.get("escalate", weights.get("generate"))
    model = None if largest is None else family_of(open_model(largest, unread=True))
    equal = getattr(run.parts["search"], "aggregate", "best") == "majority"
    votes = []
    for sample in read_samples(folder):
        for ballots in _begun(folder, sample, run.task, equal):
            winners = elected([ballot.answer for ballot, _ in ballots], [ballot.weight for ballot, _ in ballots])
            seen = features([ballot for ballot, _ in ballots])
            votes.append(Vote(sample["question"], model, seen, ballots[winners[0]][1]))
    return run.task.name, model, votes


def _begun(folder: Path, sample: Mapping[str, Any], task: Task, equal: bool) -> Iterator[list[tuple[Ballot, float]]]:
    """Yield the beginnings of a sample's vote, with the score of each ballot: the first solutions of each source.

    Only the whole vote counts if solutions share thoughts.
    """
    tree, leaves = read_leaves(folder, sample, task)
    nodes = [tree[number] for number in leaves]
    weights, sources = votes_of(nodes, equal), [source_of(node) for node in nodes]
    ballots = [
        None if answer is None else (Ballot(task.canonical(answer), weights[node.id], source), score)
        for node, source, (answer, score) in zip(nodes, sources, leaves.values(), strict=True)
    ]
    turns = [sources[: i + 1].count(source) for i, source in enumerate(sources)]
    most = max(turns, default=0)
    sizes = range(1, most + 1) if len(tree) == len(nodes) + 1 else [most]
    subsets = {
        tuple(i for i, turn in enumerate(turns) if turn <= size and source in (None, sources[i]))
        for size in sizes
        for source in {None, *sources}
    }
    for subset in sorted(subsets):
        given = [ballot for i in subset if (ballot := ballots[i]) is not None]
        if len(subset) > 1 and given:
            yield given


def fit(votes: Sequence[Vote], task: str | None = None, model: str | None = None) -> Curve:
    """Fit a curve by logistic regression, with equal weight for each question and Platt's targets.

    Raises OptionError for too few questions.
    """
    from scipy.optimize import minimize

    questions = len({vote.question for vote in votes})
    if questions < MIN_QUESTIONS:
        place = f"{task or 'all tasks'}, {model or 'all models'}"
        raise OptionError(
            f"{place}: {questions} questions have votes of two or more samples, but a curve needs {MIN_QUESTIONS}: "
            "evaluate more, with a search such as self-consistency"
        )
    known = [vote.seen.weight for vote in votes if vote.seen.weight] or [1.0]
    low, high = (float(edge) for edge in np.percentile(known, (5, 95)))
    rows = np.array([[getattr(vote.seen, name) for name in _NAMES] for vote in votes])
    column = rows[:, _NAMES.index("weight")]
    column[:] = np.where(column == 0, (low + high) / 2, np.clip(column, low, high))
    counts = Counter((vote.question, vote.model) for vote in votes)
    share = np.array([1 / counts[vote.question, vote.model] for vote in votes]) / len(counts)
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


def cross_validated(votes: Sequence[Vote]) -> Reliability:
    """Return the reliability of certainties from curves that were fitted on other questions."""
    places = {question: i for i, question in enumerate(dict.fromkeys(vote.question for vote in votes))}
    folds = [places[vote.question] % _FOLDS for vote in votes]
    curves = [fit([vote for vote, own in zip(votes, folds, strict=True) if own != fold]) for fold in range(_FOLDS)]
    certainties = [curves[fold].certainty(vote.seen) for vote, fold in zip(votes, folds, strict=True)]
    measured = reliability(certainties, [vote.score for vote in votes])
    assert measured is not None  # every vote has a certainty
    return measured
