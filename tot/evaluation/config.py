"""The options of an evaluation (task, search and questions), from Python, flags or YAML.

Evaluations with equal options and equal files are the same, and one can resume the other.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from tot.config import ModelFlags, SearchConfig, as_text
from tot.decoders.errors import OptionError, readable, unknown
from tot.decoders.registry import declared
from tot.decoders.request import Purpose
from tot.evaluators.likelihood import Likelihood
from tot.evaluators.value import Value
from tot.registry import EVALUATORS, load_task, named, options_to_json, refuse_code
from tot.task.checked import CheckedTask
from tot.task.task import Task
from tot.yaml_files import read_mapping

FORMAT = "tot.evaluation"
VERSION = 1
OF_RAY = ("ray_address", "replicas")


class EvaluationOptions(BaseModel):
    """Which questions an evaluation searches, where, and how many concurrently."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    data: str = Field(
        description="Questions with answers: a .jsonl, .json, .csv, .parquet or .txt file; org/name:split on the "
        "hub; or instances:0-99 for questions that the task generates from these seeds; by default the task's own."
    )
    limit: int | None = Field(None, ge=1, description="Number of rows to search.")
    offset: int = Field(0, ge=0, description="Number of rows to skip before the first.")
    repeats: int = Field(1, ge=1, description="Searches per question, each with its own seed.")
    judge: str | None = Field(
        None,
        description="Evaluator (value, classify, likelihood or explain) that also rates each answer with the model of "
        "evaluate; the score does not depend on it.",
    )
    concurrency: int = Field(
        16, ge=1, description="Concurrent searches, sharing forward passes; doesn't affect results."
    )
    executor: Literal["local", "ray"] = Field(
        "local", description="Where searches run: in this process, or on the workers of a Ray cluster."
    )
    ray_address: str | None = Field(
        None,
        description="A Ray cluster's host:port; by default RAY_ADDRESS, otherwise a cluster started for the run.",
    )
    replicas: int | None = Field(
        None,
        ge=1,
        description="Ray workers, each with its own engine and an equal share of the cores, which share the "
        "concurrency; one per node by default.",
    )


@dataclass(frozen=True)
class EvaluationRun:
    """A task, its search configuration and the options of its evaluation."""

    name: str
    """The task's name, as `load_task` accepts it."""
    task: Task
    config: SearchConfig
    options: EvaluationOptions
    parts: Mapping[str, Any]
    """The search, generator and evaluator that `config` names."""
    judge: Value | Likelihood | None = None
    """Also rates each answer."""
    filters: Mapping[Purpose, Mapping[str, float]] = field(default_factory=dict)
    """The sampling filters by purpose, once the evaluation runs."""

    @classmethod
    def of(cls, given: Mapping[str, Any], config: SearchConfig | None = None) -> EvaluationRun:
        """Resolve the task, and fields of `EvaluationOptions` and `SearchConfig`, as in Python, flags or files.

        Raises TotError for unknown names and for incompatible options.
        """
        fields = EvaluationOptions.model_fields
        for one in given:
            if one not in {"task", *fields, *SearchConfig.names()}:
                known = {"task", *fields, *ModelFlags.model_fields, *SearchConfig.model_fields}
                raise OptionError(unknown("option", str(one), known))
        if (task := given.get("task")) is None:
            raise OptionError("no task is given: give its name, such as gsm8k, or path/to/file.py:ClassName")
        config = SearchConfig.of(config, {one: given[one] for one in given if one != "task" and one not in fields})
        data = given.get("data") or CheckedTask(load_task(task)).data_set
        if not data:
            raise OptionError("the task has no data set of its own: give --data FILE, or org/name:split on the hub")
        try:
            own = EvaluationOptions(**{one: given[one] for one in given if one in fields} | {"data": str(data)})
        except ValidationError as error:
            raise OptionError(readable(error)) from None
        for option in OF_RAY:
            if own.executor != "ray" and (value := getattr(own, option)) is not None:
                flag = option.replace("_", "-")
                raise OptionError(
                    f"--{flag} {value} is for Ray workers only: add --executor ray, or leave --{flag} out"
                )
        suited = config.suited(task)
        config = config.model_copy(update={"prompts": suited.prompts.kind})
        judge = None if own.judge is None else named(own.judge, EVALUATORS)
        if judge is not None:
            if not isinstance(judge, Value | Likelihood):
                raise OptionError(f"judge {own.judge} does not rate an answer alone: choose value or likelihood")
            suited.prompts.require(judge.template)
        name = task if isinstance(task, str) else _name(load_task(task))
        return cls(name, suited, config, own, config.parts(suited), judge)

    @property
    def used(self) -> dict[str, Any]:
        """The search, the generator and the evaluator with all their options, and the token limit of each template."""
        most = {} if self.config.max_tokens is None else {"max_tokens": self.config.max_tokens}
        sampling = {
            template: {
                name: min(value, most.get(name, value)) for name, value in {**most, **own}.items() if name != "stop"
            }
            for template, own in self.task.sampling.items()
        }
        parts = {kind: {**options_to_json(part), "name": as_text(part)} for kind, part in self.parts.items()}
        used: dict[str, Any] = json.loads(json.dumps({**parts, "sampling": sampling}))
        return used

    def to_json(self) -> dict[str, Any]:
        """Return the options as JSON data for config.yaml, without keys and passwords."""
        options = self.options.model_dump(mode="json", exclude_none=True)
        return {"task": self.name, "data": options.pop("data"), **self.config.to_json(), **options}


def _name(task: Task) -> str:
    """Return the task's registered name, otherwise its "module:class"."""
    place = f"{type(task).__module__}:{type(task).__qualname__}"
    return next((entry.name for entry in declared("tot.tasks").values() if entry.value == place), place)


def read_yaml(path: Path, given: Collection[str] = ()) -> dict[str, Any]:
    """Read options from a user's file or an evaluation's config.yaml; names may be spelled as flags ("max-tokens").

    Drops the versions and hashes of config.yaml, which only --resume reads. Raises OptionError, also for a config.yaml
    that names code, except in the options that are `given` on the command line.
    """
    options = read_mapping(path, "limit: 50")
    own = {name: options.pop(name, None) for name in ("format", "version", "record")}
    if own["format"] is not None and (own["format"], own["version"]) != (FORMAT, VERSION):
        raise OptionError(
            f"{path} is {own['format']!r}, version {own['version']!r}: this program reads {FORMAT!r}, {VERSION}"
        )
    found = {str(name).replace("-", "_"): value for name, value in options.items()}
    if own["format"] is not None:
        refuse_code({name: value for name, value in found.items() if {name, f"{name}s"}.isdisjoint(given)}, path)
    return found
