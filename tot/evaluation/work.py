"""What an evaluation does: its configuration as a folder keeps it, the task, and how that is searched.

Given in Python, objects are named for the configuration, so that a resumed run can tell whether they are the same.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from tot.config import SearchConfig
from tot.decoders.budget import Budget
from tot.evaluation.configuration import Configuration
from tot.registry import load_task
from tot.task import Task

_LOADING = ("dtype", "device", "kv_budget", "quantize")


@dataclass(frozen=True)
class Work:
    """A configuration, and what its names stand for."""

    configuration: Configuration
    task: Task
    config: SearchConfig

    @classmethod
    def named(cls, configuration: Configuration) -> Work:
        """From names alone. Raises TotError for those that mean nothing."""
        task = load_task(configuration.task)
        return cls(configuration, task, configuration.config(task))

    @classmethod
    def given(cls, task: Task | type[Task] | str, config: SearchConfig, options: Mapping[str, Any]) -> Work:
        """From names and objects; `options` are the configuration's other ones. Raises TotError."""
        name, task = task if isinstance(task, str) else None, load_task(task)
        model_options = config.model_options
        loading = {name: str(model_options[name]) for name in _LOADING if model_options.get(name) is not None}
        own = [f"{name}={_text(value)}" for name, value in model_options.items() if name not in _LOADING]
        parts = {kind: _text(getattr(config, kind)) for kind in ("search", "generator", "evaluator")}
        same = {
            name: getattr(config, name) for name in ("max_tokens", "top_k", "top_p", "min_p", "seed", "reproducible")
        }
        configuration = Configuration.made(
            {
                "task": name or _task_name(task),
                "model": _text(config.asked_model) or "none",
                "decoder": _text(config.decoder),
                "decoder_option": own,
                **{f"budget_{limit}": value for limit, value in (config.budget or Budget()).model_dump().items()},
                **parts,
                **same,
                **loading,
                **options,
            }
        )
        return cls(configuration, task, config.model_copy(update=config.parts(task)))


def _task_name(task: Task) -> str:
    """The name that `load_task` takes, where there is one."""
    place = f"{type(task).__module__}:{type(task).__qualname__}"
    return next((entry.name for entry in entry_points(group="tot.tasks") if entry.value == place), place)


def _text(part: Any) -> str | None:
    """Names as they are, pairs as flags spell them, objects by their class, with options where they have some."""
    if part is None or isinstance(part, str):
        return part
    if isinstance(part, Mapping):
        return ",".join(f"{name}={_text(value)}" for name, value in part.items())
    if isinstance(part, list | tuple):
        return ",".join(map(str, part))
    if isinstance(part, Path | int | float):
        return str(part)
    return re.sub(r" at 0x[0-9a-f]+", "", repr(part)) if isinstance(part, BaseModel) else type(part).__name__
