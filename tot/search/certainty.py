"""Certainty: the probability that the answer of a vote is right, from a logistic curve over its ballots (Platt, 1999).

A JSON file holds a curve for each task and model. `python -m benchmarks calibrate` fits such files on questions with
known answers.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from tot.decoders.errors import OptionError, readable, reason
from tot.llm.decoders import identity_of
from tot.search.votes import Ballot
from tot.task.call_votes import elected
from tot.task.task import Task

SHIPPED = Path(__file__).with_name("certainty.json")
"""Curves for whole solutions that are sampled independently."""


class Features(BaseModel):
    """Properties of a vote, or their coefficients in a curve."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    share: float
    """The leading answer's share of the weight; one more ballot, for no answer, keeps small votes below 1."""
    agree: float
    """1 if ballots from different sources, such as written answers and programs, elect the answer; otherwise 0."""
    weight: float
    """Mean weight of its ballots, such as the probability of their texts; 0 if weights are not between 0 and 1."""


class Curve(BaseModel):
    """A logistic curve for one task and model."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    task: str
    """The task's `name`."""
    model: str | None
    """The model, as returned by `identity_of`; None for a model that does not run locally."""
    questions: int
    """Number of questions that the curve was fitted on."""
    intercept: float
    coefficients: Features
    weights: tuple[float, float]
    """Range of the mean weights of answers in the fit; others are clipped to it."""

    def certainty(self, vote: Features) -> float:
        """Return the probability that the answer of a vote is right."""
        low, high = self.weights
        weight = min(max(vote.weight, low), high) if vote.weight else (low + high) / 2
        terms = (factor * (weight if name == "weight" else getattr(vote, name)) for name, factor in self.coefficients)
        return 1 / (1 + math.exp(-max(min(self.intercept + math.fsum(terms), 30.0), -30.0)))


class _File(BaseModel):
    model_config = ConfigDict(extra="forbid")

    format: Literal["tot.certainty"] = "tot.certainty"
    version: Literal[2] = 2
    curves: tuple[Curve, ...]


def features(ballots: Sequence[Ballot]) -> Features:
    """Return the properties of a vote with at least one ballot."""
    weights = [ballot.weight for ballot in ballots]
    if not (math.isfinite(math.fsum(weights)) and math.fsum(weights) > 0):
        weights = [1.0] * len(ballots)
    winners = elected([ballot.answer for ballot in ballots], weights)
    leader = math.fsum(weights[i] for i in winners)
    return Features(
        share=leader / (math.fsum(weights) * (1 + 1 / len(ballots))),
        agree=float(len({ballots[i].source.partition("@")[0] for i in winners}) > 1),
        weight=leader / len(winners) if min(weights) < 1 >= max(weights) else 0.0,
    )


def curves_for(task: Task, path: str | Path | None) -> tuple[Curve, ...]:
    """Return the curves of a file, by default the shipped one, for a task.

    Raises OptionError if the file can't be read, or a given file has no curve for the task.
    """
    curves = _read(Path(path or SHIPPED))
    found = tuple(curve for curve in curves if curve.task == task.name)
    if not found and path is not None:
        raise _missing(path, [curve.task for curve in curves], task.name)
    return found


def curve_for(task: Task, decoders: Mapping[Any, Any], path: str | Path | None) -> Curve | None:
    """Return the curve for a task and the model of its decoders by purpose.

    None if no shipped curve was fitted for the task and model. If a search asks a larger model where it is not sure,
    the curve is the larger model's. Raises OptionError if the file can't be read, or a given file has no curve for the
    task and model.
    """
    decoder = decoders.get("escalate") or decoders.get("generate")
    curves, model = curves_for(task, path), identity_of(getattr(getattr(decoder, "engine", None), "loaded", None))
    found = next((curve for curve in curves if curve.model == model), None)
    if found is None and path is not None:
        raise _missing(path, [curve.model for curve in curves], model or "a model that does not run locally")
    return found


def _missing(path: str | Path, known: Iterable[str | None], wanted: str) -> OptionError:
    names = ", ".join(sorted({name or "models that do not run locally" for name in known})) or "nothing"
    return OptionError(
        f"{path} has certainty curves for {names}, not for {wanted}: fit one with `python -m benchmarks calibrate`, or "
        "leave it out"
    )


def to_json(curves: Sequence[Curve]) -> dict[str, Any]:
    """Return the contents of a file with these curves."""
    return _File(curves=tuple(curves)).model_dump(mode="json")


def _read(path: Path) -> tuple[Curve, ...]:
    try:
        return _File.model_validate_json(path.read_text(encoding="utf-8")).curves
    except ValidationError as error:
        raise OptionError(
            f"{path} is not a file of certainty curves, version 2 ({readable(error)}): fit one with "
            "`python -m benchmarks calibrate`"
        ) from None
    except (OSError, ValueError) as error:
        raise OptionError(f"certainty curves {path} can't be read ({reason(error)}): give another file") from None
