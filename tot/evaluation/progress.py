"""Report an evaluation's progress on the terminal, and optionally to Weights & Biases or trackio.

The terminal shows a bar with the remaining time, the score, tokens per second and acceptance; in pipes, warnings only.
Any object with the three methods of `Tracker` can be a tracker.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping
from importlib import import_module
from typing import Any, Protocol

from rich.progress import BarColumn, MofNCompleteColumn, TimeRemainingColumn

from tot.decoders.errors import OptionError, unknown
from tot.evaluation.estimate import wilson
from tot.evaluation.results import tokens_of
from tot.report.terminal import complain, progress
from tot.search.session import SearchSession

_DRAFTED = ("drafted", "accepted", "reached")
_REPORT_SECONDS = 30.0
"""Interval of the lines in a pipe, in place of a bar."""
_MAX_WARNINGS = 10
"""Number of warnings that are printed; log.txt has all of them."""


class Progress:
    """Count finished and running searches, and show them on standard error."""

    def __init__(self, total: int) -> None:
        self.running: set[SearchSession | None] = set()
        self.done = 0
        self._sum = 0.0
        self._scored = 0
        self._failed = 0
        self._spent: Counter[str] = Counter()
        self._start_time = time.monotonic()
        self._reported = self._start_time
        self._total = total
        self._warnings = 0
        columns = (BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        self._bars = progress(lambda: self.line, *columns, total=total)

    @property
    def score(self) -> float | None:
        """The mean score; None while every search has failed."""
        return self._sum / self._scored if self._scored > self._failed else None

    @property
    def line(self) -> str:
        """A line such as "score 31.0% (22.8% to 40.6%), 240 tokens/s, acceptance rate 71% (52% of drafted)"."""
        spent = self._spent.copy()
        for session in filter(None, list(self.running)):
            spent["tokens"] += session.meter.new_tokens
            spent.update({name: getattr(session.meter.usage, name) for name in _DRAFTED})
        rate = spent["tokens"] / max(time.monotonic() - self._start_time, 1e-9)
        if not (self.done or self.running or self._scored):
            return f"loading the model … {time.monotonic() - self._start_time:.0f} s"
        parts = [] if self.score is None else [f"score {wilson(self.score, self._scored).format()}"]
        parts.append(f"{rate:.0f} tokens/s")
        if spent["reached"]:
            of_reached, of_drafted = (spent["accepted"] / spent[name] for name in ("reached", "drafted"))
            parts.append(f"acceptance rate {of_reached:.0%} ({of_drafted:.0%} of drafted)")
        return ", ".join(parts)

    def recall(self, sample: dict[str, Any]) -> None:
        """Count the score of a sample that an earlier run finished."""
        self._scored += 1
        self._failed += sample["error"] is not None
        self._sum += sample["score"]

    def finish(self, sample: dict[str, Any], session: SearchSession | None) -> None:
        """Count a newly finished sample, and remove its search from the running ones."""
        self.running.discard(session)
        self.recall(sample)
        self.done += 1
        self._spent["tokens"] += tokens_of(sample)
        self._spent.update({name: sample["measured"][name] for name in _DRAFTED})
        self._bars.update(self._bars.task_ids[0], completed=self.done)
        if not self._bars.console.is_terminal and time.monotonic() - self._reported >= _REPORT_SECONDS:
            self._reported = time.monotonic()
            complain(f"{self.done} of {self._total}: {self.line}")

    def warn(self, text: str) -> None:
        """Print a warning above the bar, up to a maximum number of warnings."""
        self._warnings += 1
        if self._warnings <= _MAX_WARNINGS:
            self._bars.console.print(" ".join(text.split()))
        elif self._warnings == _MAX_WARNINGS + 1:
            self._bars.console.print("further warnings are in log.txt")

    def __enter__(self) -> Progress:
        self._bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bars.stop()


class Tracker(Protocol):
    """Receives the events of a run."""

    def start(self, name: str, options: Mapping[str, Any]) -> None:
        """Called when a run starts or resumes. Options are plain values."""

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        """Called when the `step`-th sample is finished."""

    def finish(self, numbers: Mapping[str, float]) -> None:
        """Called when the run has ended; `numbers` is empty if it was stopped."""


class _WeightsAndBiases:
    """Tracker for Weights & Biases, or for trackio, which has the same functions."""

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


_TRACKERS = ("trackio", "wandb")


def tracker(named: str | Tracker | None) -> Tracker | None:
    """Return a tracker by name; objects pass through. Raises OptionError for an unknown or uninstalled one."""
    if not isinstance(named, str):
        return named
    if named not in _TRACKERS:
        raise OptionError(unknown("tracker", named, _TRACKERS))
    try:
        return _WeightsAndBiases(import_module(named))
    except ImportError as error:
        raise OptionError(f"{named} can't be used ({error}): pip install {named}") from None
