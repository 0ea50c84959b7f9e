"""What an evaluation is of: the task, the data and the options of its searches, as flags, in Python and in YAML.

Two runs of equal configurations on equal files are the same run, and one can go on where the other stopped.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Literal, Self

import yaml
from pydantic import Field, ValidationError

from tot.decoders.errors import OptionError, readable, reason, unknown
from tot.options import SearchOptions
from tot.registry import load_task

FORMAT = "tot.evaluation"
VERSION = 1
OF_RAY = ("ray_address", "replicas", "gpus_per_replica", "cpus_per_replica")
_SECRET = re.compile(r"(?i)(?:^|[_-])(?:key|secret|password|credentials?|auth|authorization|token)\s*=")
_USER_IN_URL = re.compile(r"//[^/@\s]*@")


class Configuration(SearchOptions):
    """Everything that decides what the samples are; and where and how many at once they are made, which does not."""

    task: str
    data: str = Field(
        description="Questions with answers: a .jsonl, .json, .csv, .parquet or .txt file, or org/name:split on the "
        "hub; by default the task's own."
    )
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

    def to_json(self) -> dict[str, Any]:
        """As JSON data, without keys and passwords: what a folder keeps."""
        options = self.model_dump(mode="json", exclude_none=True)
        options["decoder_option"] = [
            _USER_IN_URL.sub("//", option) for option in self.decoder_option if not _SECRET.search(option)
        ]
        if not self.tool:
            del options["tool"]  # earlier versions knew none
        return {name: options[name] for name in sorted(options, key=lambda name: name not in ("task", "data"))}

    @classmethod
    def from_options(cls, given: dict[str, Any]) -> Self:
        """From options by name. Raises OptionError for names that are not known, values that can't be
        taken, and a missing task or file."""
        for name in given:
            if name not in cls.model_fields:
                raise OptionError(unknown("option", str(name), cls.model_fields))
        if "task" not in given:
            raise OptionError("there is no task: give its name, such as gsm8k, or path/to/file.py:ClassName")
        if "data" not in given:
            given = {**given, "data": load_task(str(given["task"])).data_set}
            if not given["data"]:
                raise OptionError("there are no questions: give --data FILE, or org/name:split of the hub")
        try:
            made = cls.model_validate(given)
        except ValidationError as error:
            raise OptionError(readable(error)) from None
        for name in OF_RAY:
            if made.executor != "ray" and (value := getattr(made, name)) is not None:
                flag = name.replace("_", "-")
                raise OptionError(f"--{flag} {value} is for Ray's workers: add --executor ray, or leave --{flag} out")
        return made


OWN = Configuration.model_fields.keys() - SearchOptions.model_fields.keys()
"""The options that are no search's."""


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
