"""Experiment tracking: an evaluation's options and numbers, told to MLflow, Weights & Biases or trackio. Off unless
asked for; a tracker of one's own is an object with the same three methods."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any, Protocol

from tot.decoders.errors import OptionError, unknown


class Tracker(Protocol):
    """Told of a run as it happens."""

    def start(self, name: str, options: Mapping[str, Any]) -> None:
        """A run begins, or goes on. Options are plain values."""

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        """A sample is finished, the `step`-th."""

    def finish(self, numbers: Mapping[str, float]) -> None:
        """The run has ended; where it was stopped, without numbers."""


class _MLflow:
    def __init__(self, module: Any) -> None:
        self._mlflow = module
        self._step = 0

    def start(self, name: str, options: Mapping[str, Any]) -> None:
        self._mlflow.set_experiment("tot")
        self._mlflow.start_run(run_name=name)
        self._mlflow.log_params(dict(options))

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        self._step = step
        self._mlflow.log_metrics(dict(numbers), step=step)

    def finish(self, numbers: Mapping[str, float]) -> None:
        self._mlflow.log_metrics(dict(numbers), step=self._step)
        self._mlflow.end_run("FINISHED" if numbers else "KILLED")


class _WeightsAndBiases:
    """Trackio has the same functions."""

    def __init__(self, module: Any) -> None:
        self._module = module

    def start(self, name: str, options: Mapping[str, Any]) -> None:
        self._module.init(project="tot", name=name, config=dict(options))

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        self._module.log(dict(numbers), step=step)

    def finish(self, numbers: Mapping[str, float]) -> None:
        if numbers:
            self._module.log(dict(numbers))
        self._module.finish()


_TRACKERS: dict[str, Callable[[Any], Tracker]] = {
    "mlflow": _MLflow,
    "wandb": _WeightsAndBiases,
    "trackio": _WeightsAndBiases,
}


def tracker(named: str | Tracker | None) -> Tracker | None:
    """The tracker of that name; an object is itself. Raises OptionError where it isn't known or not installed."""
    if not isinstance(named, str):
        return named
    if named not in _TRACKERS:
        raise OptionError(unknown("tracker", named, _TRACKERS))
    try:
        return _TRACKERS[named](import_module(named))
    except ImportError as error:
        raise OptionError(f"{named} can't be used ({error}): pip install {named}") from None
