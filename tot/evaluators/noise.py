"""Noise: whether an evaluator is good enough to prune or to weigh votes by, and a table of measured AUROCs."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from functools import cache
from importlib.resources import files
from typing import Any, Literal, NamedTuple

from tot.llm.decoders import family_of
from tot.task.task import Task

log = logging.getLogger(__name__)

Use = Literal["prune", "weigh", "neither"]
PRUNE = 0.65
"""AUROC of unfinished solutions from which pruning half way beats a vote at equal tokens (`benchmarks/scores.md`)."""
WEIGH = 0.5
"""AUROC of whole solutions above which weights improve a vote: chance."""


class Auroc(NamedTuple):
    """A row of `measured.json`: the AUROC of an evaluator within a question, with the bounds of its 95% interval."""

    task: str
    """Class of the task."""
    model: str
    """Family of the model (`tot.llm.decoders`)."""
    evaluator: str
    """Class of the evaluator."""
    unfinished: tuple[float, float, float]
    """AUROC of unfinished solutions, lower and upper bound."""
    source: str
    """The page that reports it."""


def use_of(unfinished: float | None, whole: float | None) -> Use:
    """Return the use that the lower bounds of an evaluator's AUROC allow, of unfinished and of whole solutions."""
    if unfinished is not None and unfinished >= PRUNE:
        return "prune"
    return "weigh" if whole is not None and whole > WEIGH else "neither"


@cache
def table() -> Sequence[Auroc]:
    rows = json.loads(files(__package__).joinpath("measured.json").read_text(encoding="utf-8"))
    return [Auroc(**row) for row in rows]


def warn_if_noisy(task: Task, search: Any, evaluator: Any, model: Any) -> None:
    """Warn if a search drops states by an evaluator that the table calls too noisy for the task and the model."""
    if not (prunes := getattr(search, "prunes", None)) or not prunes(task):
        return
    names = type(task).__name__, family_of(model), type(evaluator).__name__
    for row in table():
        if row[:3] == names and use_of(row.unfinished[1], None) != "prune":
            log.warning(
                "%s is too noisy to prune by on %s with %s (AUROC %.2f, %.2f to %.2f; %s): keep all branches "
                "(bfs:select=all) or vote (self-consistency)",
                *(row.evaluator, row.task, row.model, *row.unfinished, row.source),
            )
