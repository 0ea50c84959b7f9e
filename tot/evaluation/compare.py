"""Compare evaluations on their common questions by paired differences, as tables."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
from rich.table import Table

from tot.decoders.errors import OptionError
from tot.evaluation.estimate import Estimate, bootstrap, estimate, paired
from tot.evaluation.folder import differing, flat, read_config, read_samples
from tot.evaluation.measures import measures
from tot.evaluation.pool import calibration_in, pools
from tot.evaluation.results import tokens_of

MEASURES = {"score": ".1%", "tokens": ".0f", "latency": ".1f"}
"""The compared measures, with their formats."""


@dataclass(frozen=True)
class ComparedRun:
    """An evaluation's means over the common questions, and its paired differences from the first evaluation."""

    name: str
    means: dict[str, Estimate]
    differences: dict[str, Estimate]
    """By measure; empty for the first evaluation."""


def compare(folders: Sequence[Path]) -> tuple[dict[str, float], list[ComparedRun]]:
    """Return the first evaluation's score by common question, and a `ComparedRun` for each folder.

    Questions match by their text. Raises OptionError for no or other folders, different tasks, or no common question.
    """
    if not folders:
        raise OptionError("no evaluation to compare: name two folders or more, tot eval --compare A B")
    tasks = [str(read_config(folder)["task"]) for folder in folders]
    for folder, task in zip(folders, tasks, strict=True):
        if task != tasks[0]:
            raise OptionError(f"{folders[0]} has task {tasks[0]}, but {folder} has {task}: compare runs of one task")
    questions = [_questions(folder) for folder in folders]
    common = [question for question in questions[0] if all(question in by_question for by_question in questions)]
    if not common:
        raise OptionError(f"{', '.join(map(str, folders))} have no question in common: evaluate them on the same rows")
    values = [np.array([by_question[question] for question in common]) for by_question in questions]
    runs = []
    for folder, own in zip(folders, values, strict=True):
        differences = {} if own is values[0] else _estimates(own - values[0], paired)
        runs.append(ComparedRun(str(folder), _estimates(own, estimate), differences))
    return dict(zip(common, values[0][:, 0].tolist(), strict=True)), runs


def _estimates(rows: np.ndarray[Any, Any], of_scores: Callable[[Sequence[float]], Estimate]) -> dict[str, Estimate]:
    columns = zip(MEASURES, rows.T.tolist(), strict=True)
    return {name: (of_scores if name == "score" else bootstrap)(column) for name, column in columns}


def different_options(folders: Sequence[Path]) -> Table:
    """Return a table of the options, versions and hashes that differ between evaluations."""
    configs = [read_config(folder) for folder in folders]
    rows = Table("option", *map(str, folders), title="what differs")
    for name, values in differing([flat(config | config.pop("record", {})) for config in configs]):
        rows.add_row(name, *values)
    return rows


def _questions(folder: Path) -> dict[str, tuple[float, ...]]:
    """Map each question to the means of score, tokens and latency over its samples."""
    samples: defaultdict[str, list[tuple[float, float, float]]] = defaultdict(list)
    failed = True
    try:
        for sample in read_samples(folder):
            failed = failed and sample["error"] is not None
            samples[sample["question"]].append((sample["score"], tokens_of(sample), sample["measured"]["seconds"]))
    except OSError as error:
        raise OptionError(
            f"{folder / 'samples.jsonl'} can't be read ({error}): resume that run, or leave it out"
        ) from None
    if samples and failed:
        raise OptionError(f"{folder} has no score, because every search failed: see its log.txt, and leave it out")
    return {question: tuple(np.mean(rows, axis=0)) for question, rows in samples.items()}


def table(sides: Sequence[ComparedRun]) -> Table:
    """Return a table with a row per evaluation: means with intervals, and differences from the first evaluation."""
    rows = Table(
        "evaluation",
        *(head for name in MEASURES for head in (name, "difference")),
        title="means with 95% intervals; paired differences from the first evaluation",
        caption="latency: seconds of a search, while others run",
    )
    for side in sides:
        cells = []
        for name, form in MEASURES.items():
            difference = side.differences.get(name)
            cells += [side.means[name].format(form), "" if difference is None else difference.format(f"+{form}")]
        rows.add_row(side.name, *cells)
    return rows


def pool_table(folder: Path, first: Mapping[str, float], task: str | None = None) -> Table | None:
    """Return a table with the measures of an evaluation's samples; None if no question has several samples.

    `first` has the scores that differences are from, by question; other questions don't count. Of rows with the same
    question, the last counts. `task` is the folder's, if it is not an installed one. Raises TotError as `pools` does.
    """
    if not any(sample["repeat"] or sample["thoughts"] > 1 for sample in read_samples(folder)):
        return None  # without a tree to read
    found = {sample["question"]: (sample, pool) for sample, pool in pools(folder, task) if sample["question"] in first}
    counts = [len(pool) for _, pool in found.values()]
    if (most := max(counts)) < 2:
        return None
    fewer = sum(count < most for count in counts)
    rows = Table(
        *("measure", "score", "difference", "tokens", "seconds"),
        title=f"{folder}: {len(found)} questions, {most} samples each",
        caption=f"{fewer} questions have fewer samples, and count with all of them" if fewer else None,
    )
    seconds = fmean(sample["measured"]["seconds"] for sample, _ in found.values())
    whole = read_config(folder).get("repeats", 1) == 1  # one search drew all samples of a question
    for (name, k), values in measures([pool for _, pool in found.values()], calibration_in(folder, task)).items():
        differences = [score - first[question] for question, (score, _) in zip(found, values, strict=True)]
        rows.add_row(
            name.format(k),
            estimate([score for score, _ in values]).format(),
            paired(differences).format("+.1%"),
            f"{fmean(tokens for _, tokens in values):.0f}",
            f"{seconds:.1f}" if whole and k == most else "",
        )
    return rows
