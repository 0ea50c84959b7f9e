"""An evaluation: a task, how to search, and which questions; from Python, flags and YAML.

Two evaluations of equal options on equal files are the same, and one can resume the other.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from tot.config import SearchConfig
from tot.decoders.errors import OptionError, readable, reason, unknown
from tot.decoders.registry import declared
from tot.registry import load_task
from tot.task.task import Task

FORMAT = "tot.evaluation"
VERSION = 1
OF_RAY = ("ray_address", "replicas", "gpus_per_replica", "cpus_per_replica")


class EvaluationOptions(BaseModel):
    """Which questions are searched, where, and how many at once."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    data: str = Field(
        description="Questions with answers: a .jsonl, .json, .csv, .parquet or .txt file, or org/name:split on the "
        "hub; by default the task's own."
    )
    question_column: str | None = Field(None, description="The column with the questions, if it has another name.")
    answer_column: str | None = Field(None, description="The column with the answers, if it has another name.")
    limit: int | None = Field(None, ge=1, description="Rows to take.")
    offset: int = Field(0, ge=0, description="Rows to leave out before them.")
    shuffle_seed: int | None = Field(
        None, ge=0, description="Take the rows in a random order; other seeds, other orders."
    )
    repeats: int = Field(1, ge=1, description="How often each question is searched, by other seeds.")
    concurrency: int = Field(16, ge=1, description="Searches at once, which share forward passes; no other results.")
    executor: Literal["local", "ray"] = Field(
        "local", description="Where searches run: here, or on the workers of a Ray cluster."
    )
    ray_address: str | None = Field(
        None,
        description="A Ray cluster's host:port; by default RAY_ADDRESS, else one that is started for the run.",
    )
    replicas: int | None = Field(
        None,
        ge=1,
        description="Ray workers, each with an engine of its own, among which the concurrency is split; one a node by "
        "default.",
    )
    gpus_per_replica: float | None = Field(
        None, ge=0, description="GPUs of each Ray worker, or a share of one; none by default."
    )
    cpus_per_replica: int | None = Field(None, ge=1, description="Cores and threads of each Ray worker; 1 by default.")


@dataclass(frozen=True)
class EvaluationRun:
    """A task, how to search its questions, and which of them."""

    name: str
    """The task's name, which `load_task` takes."""
    task: Task
    config: SearchConfig
    options: EvaluationOptions
    parts: Mapping[str, Any]
    """The search, generator and evaluator that `config` names."""

    @classmethod
    def of(cls, task: Task | type[Task] | str, config: SearchConfig, options: Mapping[str, Any]) -> EvaluationRun:
        """Resolve names. Raises TotError for unknown ones, and for options that don't fit together."""
        name = task if isinstance(task, str) else _name(load_task(task))
        data = options.get("data") or load_task(task).data_set
        if not data:
            raise OptionError("there are no questions: give --data FILE, or org/name:split of the hub")
        try:
            own = EvaluationOptions(**{**options, "data": str(data)})
        except ValidationError as error:
            raise OptionError(readable(error)) from None
        for option in OF_RAY:
            if own.executor != "ray" and (value := getattr(own, option)) is not None:
                flag = option.replace("_", "-")
                raise OptionError(f"--{flag} {value} is for Ray's workers: add --executor ray, or leave --{flag} out")
        found = config.suited(task)
        config = config.model_copy(update={"prompts": found.prompts})
        return cls(name, found, config, own, config.parts(found))

    @classmethod
    def read(cls, given: Mapping[str, Any]) -> EvaluationRun:
        """Resolve options by name, as flags and files give them. Raises TotError."""
        own = EvaluationOptions.model_fields.keys()
        for name in given:
            if name not in {"task", *own, *SearchConfig.names()}:
                raise OptionError(unknown("option", str(name), {"task", *own, *SearchConfig.model_fields}))
        if "task" not in given:
            raise OptionError("there is no task: give its name, such as gsm8k, or path/to/file.py:ClassName")
        config = {name: value for name, value in given.items() if name != "task" and name not in own}
        options = {name: value for name, value in given.items() if name in own}
        return cls.of(str(given["task"]), SearchConfig.of(None, config), options)

    @property
    def columns(self) -> dict[str, str]:
        """The columns that have other names, by the names that tasks read."""
        named = {"question": self.options.question_column, "answer": self.options.answer_column}
        return {name: column for name, column in named.items() if column is not None}

    def to_json(self) -> dict[str, Any]:
        """Write the options as JSON data, without keys and passwords: what a folder keeps."""
        options = self.options.model_dump(mode="json", exclude_none=True)
        return {"task": self.name, "data": options.pop("data"), **self.config.to_json(), **options}


def _name(task: Task) -> str:
    """The name that `load_task` takes, if there is one."""
    place = f"{type(task).__module__}:{type(task).__qualname__}"
    return next((entry.name for entry in declared("tot.tasks").values() if entry.value == place), place)


def read_yaml(path: Path) -> dict[str, Any]:
    """The options in a file that a user or an evaluation wrote; names may be spelled as flags ("max-tokens").

    What an evaluation's own file says of versions and hashes is for --resume, and left out. Raises OptionError.
    """
    found = read_mapping(path)
    own = {name: found.pop(name, None) for name in ("format", "version", "record")}
    if own["format"] is not None and (own["format"], own["version"]) != (FORMAT, VERSION):
        raise OptionError(
            f"{path} is {own['format']!r}, version {own['version']!r}: this program reads {FORMAT!r}, {VERSION}"
        )
    found = found if own["format"] is None else as_now(found)
    return {str(name).replace("-", "_"): value for name, value in found.items()}


def as_now(found: dict[Any, Any]) -> dict[Any, Any]:
    """An evaluation's options as they are now: earlier versions knew no prompts but the papers', and a judge."""
    if not found.get("judge"):
        found.pop("judge", None)
    return {"prompts": "papers", **found}


def read_mapping(path: Path) -> dict[Any, Any]:
    """A YAML file of `name: value` lines. Raises OptionError for any other."""
    try:
        found = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        raise OptionError(f"{path} can't be read as YAML: {reason(error)}") from None
    if not isinstance(found, dict):
        raise OptionError(f"{path} has no options: write lines such as `limit: 50`")
    return found
