"""Evaluations side by side: the paired bootstrap on the problems that all of them have, as a table and a picture."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.table import Table

from tot.decoders.errors import OptionError
from tot.evaluation.estimate import Estimate, bootstrap, estimate
from tot.evaluation.folder import read_config, read_samples
from tot.evaluation.results import tokens_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MEASURES = ("score", "tokens", "seconds")


@dataclass(frozen=True)
class ComparedRun:
    """An evaluation's means over the problems that all have, and its differences to the first one, pair by pair."""

    name: str
    means: dict[str, Estimate]
    differences: dict[str, Estimate]
    """By measure; of the first side none."""


def compare(folders: Sequence[Path]) -> tuple[int, list[ComparedRun]]:
    """How many problems all have, and a side for each folder. Problems are the same where their questions are.

    Raises OptionError for fewer than two folders, for one that is none, for other tasks, and without common problems.
    """
    if len(folders) < 2:
        raise OptionError("there is nothing to compare: name two folders or more, tot eval --compare A B")
    tasks = [str(read_config(folder)["task"]) for folder in folders]
    for folder, task in zip(folders, tasks, strict=True):
        if task != tasks[0]:
            raise OptionError(f"{folders[0]} is of the task {tasks[0]}, and {folder} of {task}: they can't be compared")
    problems = [_problems(folder) for folder in folders]
    common = [question for question in problems[0] if all(question in each for each in problems)]
    if not common:
        raise OptionError(f"{', '.join(map(str, folders))} have no problem in common: evaluate them on the same rows")
    values = [np.array([each[question] for question in common]) for each in problems]
    sides = []
    for folder, mine in zip(folders, values, strict=True):
        means = {name: estimate(column.tolist()) for name, column in zip(MEASURES, mine.T, strict=True)}
        off = {} if mine is values[0] else _differences(mine - values[0])
        sides.append(ComparedRun(str(folder), means, off))
    return len(common), sides


def _differences(pairs: np.ndarray[Any, Any]) -> dict[str, Estimate]:
    return {name: bootstrap(column.tolist()) for name, column in zip(MEASURES, pairs.T, strict=True)}


def _problems(folder: Path) -> dict[str, tuple[float, ...]]:
    """By question: the means of score, tokens and seconds over its samples."""
    samples: defaultdict[str, list[tuple[float, float, float]]] = defaultdict(list)
    failed = True
    try:
        for sample in read_samples(folder):
            failed = failed and sample["error"] is not None
            samples[sample["question"]].append((sample["score"], tokens_of(sample), sample["measured"]["seconds"]))
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise OptionError(
            f"{folder / 'samples.jsonl'} can't be read ({error}): resume that run, or leave it out"
        ) from None
    if samples and failed:
        raise OptionError(f"{folder} has no score, as every search failed: see its log.txt, and leave it out")
    return {question: tuple(np.mean(found, axis=0)) for question, found in samples.items()}


def table(sides: Sequence[ComparedRun]) -> Table:
    """A row for each side: means with intervals, and differences to the first side."""
    forms = {"score": ".1%", "tokens": ".0f", "seconds": ".1f"}
    columns = [head for name in MEASURES for head in (name, "difference")]
    rows = Table("evaluation", *columns, title="means with 95% intervals; differences to the first, problem by problem")
    for side in sides:
        cells = []
        for name, form in forms.items():
            off = side.differences.get(name)
            cells += [side.means[name].format(form), "" if off is None else off.format(f"+{form}")]
        rows.add_row(side.name, *cells)
    return rows


def picture(sides: Sequence[ComparedRun]) -> Figure:
    """Score against tokens and against seconds, a cross of intervals for each side. Needs matplotlib."""
    from tot.report.plots import new_figure

    figure: Figure = new_figure(10.0, 4.5)
    for axes, cost in zip(figure.subplots(1, 2, sharey=True), ("tokens", "seconds"), strict=True):
        for side in sides:
            x, y = side.means[cost], side.means["score"]
            reach = {"xerr": _reach(x), "yerr": _reach(y)}
            axes.errorbar(x.mean, y.mean, **reach, marker="o", capsize=3, linewidth=1, label=side.name)
        axes.set_xlabel(f"{cost} a problem")
    figure.axes[0].set_ylabel("score")
    figure.axes[0].legend(fontsize="small")
    return figure


def _reach(of: Estimate) -> list[list[float]]:
    return [[max(of.mean - of.low, 0.0)], [max(of.high - of.mean, 0.0)]]
