"""Fit calibrations for the search auto on evaluations of questions with known answers.

The questions of several folders with the same task and model are joined: each counts with the samples of all folders.

    M="--data instances:630-944 --model qwen2.5-coder-0.5b-instruct-q4_k_m.gguf"
    tot eval reasoning-gym:all $M --search self-consistency:samples=8,solutions=chain+program --out pool
    tot eval reasoning-gym:all $M --search cot --out written
    tot eval reasoning-gym:all $M --search cot:solutions=program --out programs
    python -m benchmarks calibrate --folder pool --folder written --folder programs --out own.json
    tot eval reasoning-gym:all --calibration own.json
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
from pydantic import BaseModel, Field
from rich.console import Console
from rich.table import Table

from tot.cli.flags import writable
from tot.decoders.errors import OptionError
from tot.decoders.files import write_json
from tot.evaluation.estimate import Reliability, reliability
from tot.evaluation.folder import read_config
from tot.evaluation.measures import calibrated
from tot.evaluation.pool import Sample, model_in, pools
from tot.registry import load_task, refuse_code
from tot.search.calibration import Calibration, Source, template_of, to_json
from tot.task.task import Task

MIN_QUESTIONS = 20
_FOLDS = 5
_ORDERS = 4
"""Random orders of a question's samples, whose beginnings are votes."""
_PENALTY = 0.3
"""Of the squared coefficients, for all questions together."""
Drawn = Sequence[Sample]


class Options(BaseModel):
    """Fit calibrations for the search auto on evaluations of whole solutions, by task and model."""

    folder: list[str] = Field(description="A folder of tot eval, on rows that are not for testing. Repeat for more.")
    out: Path = Field(description="The .json file to write, for --calibration.")
    task: str | None = Field(
        None, description="The task of the folders, path/to/file.py:ClassName, if it is not an installed one."
    )
    skip: list[str] = Field([], description="Leave out questions whose reference has this dataset. Repeat for more.")
    general: bool = Field(False, description="Fit one calibration on all folders, for any task and model.")


def run(asked: Options, console: Console) -> None:
    """Print how well the calibrations predict, and write them."""
    writable(asked.out)
    found = calibrate([Path(one) for one in asked.folder], asked.task, asked.skip, asked.general)
    title = "cross-validated by question"
    names = ("task", "model", "questions", "votes", "calibration error", "surer half", "other half")
    table = Table(*names, title=title)
    for one, measured in found:
        surer, whole = (measured.score_at_coverage[share] for share in (50, 100))
        halves = f"{surer:.1%}", f"{2 * whole - surer:.1%}"
        sizes = f"{one.questions:,}", f"{measured.samples:,}"
        table.add_row(one.task or "any", one.model or "any", *sizes, f"{measured.error:.1%}", *halves)
    console.print(table)
    write_json(asked.out, to_json([one for one, _ in found]))


def calibrate(
    folders: Sequence[Path],
    task: Task | type[Task] | str | None = None,
    skip: Sequence[str] = (),
    general: bool = False,
) -> list[tuple[Calibration, Reliability]]:
    """Fit a calibration for each task and model of some evaluations, or a general one for all of them.

    `task` is the evaluations' task if it is not an installed one, because no code that a folder names is run. Returns
    each with the reliability that cross-validation by question measures. Raises OptionError for evaluations with too
    few questions, and what `pools` raises.
    """
    groups: dict[tuple[str | None, str | None], dict[tuple[str, str], list[Sample]]] = {}
    for folder in folders:
        config = read_config(folder)
        refuse_code({} if task else {"task": config.get("task", "")}, folder / "config.yaml")
        if config.get("escalate"):
            raise OptionError(f"{folder} has samples of two models: give folders with one")
        identity, name = model_in(folder), load_task(task or config["task"]).name
        for row, drawn in pools(folder, task):
            reference = row.get("reference")
            if not (isinstance(reference, Mapping) and reference.get("dataset") in skip):
                kind: tuple[str | None, str | None] = (None, None) if general else (name, identity)
                own = groups.setdefault(kind, {}).setdefault((f"{name} {identity}", row["question"]), [])
                own += drawn
    found = []
    for (of_task, of_model), by_question in groups.items():
        samples = list(by_question.values())
        if len(samples) < MIN_QUESTIONS:
            about = f"{of_task or 'any task'}, {of_model or 'no local model'}"
            raise OptionError(
                f"{about}: {len(samples)} questions, but a calibration needs {MIN_QUESTIONS}: evaluate more"
            )
        found.append((fit(samples, of_task, of_model), cross_validated(samples)))
    return found


def fit(drawn: Sequence[Drawn], task: str | None = None, model: str | None = None) -> Calibration:
    """Fit a calibration to the samples of some questions: first the exponents, then the gains."""
    names = [name for name, _ in Counter(template_of(one.source) for some in drawn for one in some).most_common()]
    flat = [one for some in drawn for one in some]
    tokens = {name: fmean(one.tokens for one in flat if template_of(one.source) == name) for name in names}
    votes = votes_of(drawn)
    exponents = _exponents(votes, names)
    none, weights, others = exponents[0], exponents[1 : 1 + len(names)], exponents[1 + len(names) :]
    sources = {
        name: Source(weight=round(weight, 3), others=round(other, 3), tokens=max(round(tokens[name], 1), 0.1))
        for name, weight, other in zip(names, weights, others, strict=True)
    }
    about = {"task": task, "model": model, "questions": len(drawn), "none": round(none, 3), "sources": sources}
    fitted = Calibration(**about, gains=(0.0,))
    return fitted.model_copy(update={"gains": _gains(fitted, votes)})


def votes_of(drawn: Sequence[Drawn]) -> list[list[list[Sample]]]:
    """Return votes for each question: the beginnings of random orders of its samples. The sources take turns."""
    chance = random.Random(0)
    votes = []
    for some in drawn:
        begun = []
        for _ in range(_ORDERS):
            turns: Counter[str] = Counter()
            order = []
            for one in chance.sample(some, len(some)):
                name = template_of(one.source)
                order.append((turns[name], one))
                turns[name] += 1
            order.sort(key=lambda pair: pair[0])
            begun += [[one for _, one in order[:size]] for size in range(1, len(order) + 1)]
        votes.append(begun)
    return votes


def _exponents(votes: Sequence[Sequence[Drawn]], names: Sequence[str]) -> list[float]:
    """Return `none`, the weights and the `others` of the sources, by maximum likelihood with a penalty."""
    from scipy.optimize import minimize

    flat = [(vote, 1 / len(begun)) for begun in votes for vote in begun]
    keys = [list(dict.fromkeys(one.key for one in vote if one.key is not None)) for vote, _ in flat]
    shape = len(flat), max(map(len, keys), default=0) or 1
    logs, right = np.zeros((*shape, len(names))), np.zeros((shape[0], shape[1] + 1), bool)
    samples, known = np.zeros((len(flat), len(names))), np.zeros(shape, bool)
    for i, (vote, _) in enumerate(flat):
        known[i, : len(keys[i])] = True
        for one in vote:
            source = names.index(template_of(one.source))
            samples[i, source] += 1
            if one.key is not None:
                place = keys[i].index(one.key)
                logs[i, place, source] += 1
                right[i, place] = one.score == 1
    right[:, -1] = ~right.any(axis=1)
    logs, samples, share = np.log1p(logs), np.log1p(samples), np.array([one for _, one in flat])

    def loss(factors: np.ndarray[Any, Any]) -> float:
        none, weights, others = factors[0], factors[1 : 1 + len(names)], factors[1 + len(names) :]
        scores = np.column_stack([np.where(known, logs @ weights, -np.inf), none + samples @ others])
        total = np.logaddexp.reduce(scores, axis=1)
        of_right = np.logaddexp.reduce(np.where(right, scores, -np.inf), axis=1)
        return float(share @ (total - of_right) + _PENALTY * factors @ factors)

    bounds = [(-20, 20), *[(0, 20)] * len(names), *[(-20, 20)] * len(names)]
    return [float(one) for one in minimize(loss, np.zeros(1 + 2 * len(names)), method="L-BFGS-B", bounds=bounds).x]


def _gains(fitted: Calibration, votes: Sequence[Sequence[Drawn]]) -> tuple[float, ...]:
    """Return the gain of one more sample by the number of samples, as the mean per sample until all samples."""
    most = min(max(map(len, begun)) for begun in votes)
    right = [
        fmean(calibrated(vote, fitted)[1] == 1 for begun in votes for vote in begun if len(vote) == size)
        for size in range(1, most + 1)
    ]
    rates = [0.0, *right]
    gains = [(rates[-1] - rate) / (most - size) / max(1 - rate, 0.01) for size, rate in enumerate(rates[:-1])]
    return tuple(round(max(0.0, min(gains[: i + 1])), 4) for i in range(most))


def cross_validated(drawn: Sequence[Drawn]) -> Reliability:
    """Return the reliability of probabilities by calibrations that were fitted on other questions."""
    found = []
    for fold in range(_FOLDS):
        fitted = fit([some for i, some in enumerate(drawn) if i % _FOLDS != fold])
        own = votes_of([some for i, some in enumerate(drawn) if i % _FOLDS == fold])
        found += [
            calibrated(vote, fitted) for begun in own for vote in begun if any(one.key is not None for one in vote)
        ]
    measured = reliability([sure for sure, _ in found], [float(score == 1) for _, score in found])
    assert measured is not None  # every vote has a probability
    return measured
