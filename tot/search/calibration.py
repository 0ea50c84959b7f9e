"""Calibration: what solved questions tell about the samples of a model.

Samples come from sources: the templates that write solutions, such as `chain` and `program`. After some samples,

    P(an answer is right) = v(answer) / (v(none) + the sum of v over all answers),
    v(answer) = product over the sources of (1 + votes of the source for the answer) ** weight,
    v(none)   = exp(none) * product over the sources of (1 + samples of the source) ** others.

`v(none)` is for a right answer that no sample has given. If the most probable answer has the probability p, one more
sample is expected to raise it by (1 - p) * gains[number of samples].

A JSON file holds a calibration for each task and model. `python -m benchmarks calibrate` fits it on questions with
known answers.
"""

from __future__ import annotations

import math
import zlib
from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from tot.decoders.errors import OptionError, readable, reason
from tot.llm.decoders import identity_of
from tot.search.votes import Ballot
from tot.task.task import Task

SHIPPED = Path(__file__).with_name("calibration.json")
_NOT_LOCAL = "models that do not run locally"
_FROZEN = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)
_Exponent = Annotated[float, Field(ge=-20, le=20)]


class Source(BaseModel):
    """The samples of one template."""

    model_config = _FROZEN

    weight: Annotated[_Exponent, Field(ge=0)]
    others: _Exponent
    tokens: Annotated[float, Field(gt=0)]
    """Mean number of new tokens of a sample."""


class Calibration(BaseModel):
    """The calibration for one task and model."""

    model_config = _FROZEN

    task: str | None
    """The task's `name`; None for any task."""
    model: str | None
    """The model, as returned by `identity_of`; None for any model."""
    questions: int
    """Number of questions that it was fitted on."""
    none: _Exponent
    sources: Annotated[dict[str, Source], Field(min_length=1)]
    gains: Annotated[tuple[Annotated[float, Field(ge=0, le=1)], ...], Field(min_length=1)]
    """By the number of samples so far, the share of the questions that are not right yet and that one more sample sets
    right. The last one also counts for more samples."""

    @property
    def checksum(self) -> str:
        return f"{zlib.crc32(self.model_dump_json().encode()):08x}"

    def source(self, template: str) -> Source:
        """Return the source of a template; of an unknown one, the source `chain` or else the first."""
        first = next(iter(self.sources.values()))
        return self.sources.get(template) or self.sources.get("chain", first)

    def probabilities(self, ballots: Sequence[Ballot], samples: Mapping[str, int]) -> dict[Hashable, float]:
        """Return the probability of each answer. `samples` counts all samples by source."""
        votes: dict[Hashable, Counter[str]] = {}
        for ballot in ballots:
            votes.setdefault(ballot.answer, Counter())[template_of(ballot.source)] += 1
        logs = {
            answer: math.fsum(self.source(name).weight * math.log1p(count) for name, count in counts.items())
            for answer, counts in votes.items()
        }
        none = self.none + math.fsum(self.source(name).others * math.log1p(count) for name, count in samples.items())
        top = max([none, *logs.values()])
        total = math.exp(none - top) + math.fsum(math.exp(log - top) for log in logs.values())
        return {answer: math.exp(log - top) / total for answer, log in logs.items()}

    def gain(self, samples: int, probability: float) -> float:
        """Return how much one more sample is expected to raise the probability of the best answer."""
        return (1 - probability) * self.gains[min(samples, len(self.gains) - 1)]


class _File(BaseModel):
    model_config = ConfigDict(extra="forbid")

    format: Literal["tot.calibration"] = "tot.calibration"
    version: Literal[1] = 1
    calibrations: tuple[Calibration, ...]


def template_of(source: str) -> str:
    """Return the template in a ballot's source, without its model."""
    return source.partition("@")[0]


@cache
def general() -> Calibration:
    """Return the shipped calibration for tasks and models without their own."""
    return next(one for one in _read(SHIPPED) if one.task is None)


def calibrations_for(task: Task, path: str | Path | None) -> tuple[Calibration, ...]:
    """Return the calibrations of a file, by default the shipped one, for a task.

    Raises OptionError if the file can't be read, or a given file has none for the task.
    """
    known = _read(Path(path or SHIPPED))
    found = tuple(one for one in known if one.task == task.name)
    if not found and path is not None:
        raise _missing(path, [one.task or "any task" for one in known], task.name)
    return found


def calibration_of(task: Task, decoder: Any, path: str | Path | None) -> Calibration | None:
    """Return the calibration for a task and the model of a decoder.

    None if the shipped file has none. Raises OptionError if the file can't be read, or a given file has none.
    """
    known, model = calibrations_for(task, path), identity_of(getattr(getattr(decoder, "engine", None), "loaded", None))
    found = next((one for one in known if one.model == model), None)
    if found is None and path is not None:
        raise _missing(path, [one.model or _NOT_LOCAL for one in known], model or _NOT_LOCAL)
    return found


def _missing(path: str | Path, known: Iterable[str], wanted: str) -> OptionError:
    names = ", ".join(sorted(set(known))) or "nothing"
    return OptionError(
        f"{path} has calibrations for {names}, not for {wanted}: fit one with `python -m benchmarks calibrate`, or "
        "leave it out"
    )


def to_json(calibrations: Sequence[Calibration]) -> dict[str, Any]:
    """Return the contents of a file with these calibrations."""
    return _File(calibrations=tuple(calibrations)).model_dump(mode="json")


def _read(path: Path) -> tuple[Calibration, ...]:
    try:
        return _File.model_validate_json(path.read_text(encoding="utf-8")).calibrations
    except ValidationError as error:
        raise OptionError(
            f"{path} is not a file of calibrations, version 1 ({readable(error)}): fit one with "
            "`python -m benchmarks calibrate`"
        ) from None
    except (OSError, ValueError) as error:
        raise OptionError(f"calibrations {path} can't be read ({reason(error)}): give another file") from None
