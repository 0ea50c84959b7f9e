"""Report an evaluation's progress on standard error: a bar with the score and tokens per second, or lines in a pipe."""

from __future__ import annotations

import time
from typing import Any

from rich.progress import BarColumn, MofNCompleteColumn, TimeRemainingColumn

from tot.evaluation.estimate import wilson
from tot.evaluation.results import tokens_of
from tot.report.terminal import complain, progress
from tot.run import Run

_REPORT_SECONDS = 30.0
"""Interval of the lines in a pipe, in place of a bar."""
_MAX_WARNINGS = 10
"""Number of warnings that are printed; log.txt has all of them."""


class Progress:
    """Count finished and running searches, and show them on standard error."""

    def __init__(self, total: int) -> None:
        self.running: set[Run | None] = set()
        self.done = 0
        self._scores: list[float] = []
        self._failed = self._tokens = self._warnings = 0
        self._started = self._reported = time.monotonic()
        self._total = total
        columns = (BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        self._bars = progress(lambda: self.line, *columns, total=total)

    @property
    def line(self) -> str:
        """Such as "score 31.0% (22.8% to 40.6%), 240 tokens/s", without a score while every search has failed."""
        seconds, scores = max(time.monotonic() - self._started, 1e-9), self._scores
        if not (self.running or scores):
            return f"loading the model … {seconds:.0f} s"
        tokens = self._tokens + sum(run.meter.new_tokens for run in list(self.running) if run is not None)
        score = wilson(sum(scores) / len(scores), len(scores)).format() if len(scores) > self._failed else ""
        return f"{f'score {score}, ' if score else ''}{tokens / seconds:.0f} tokens/s"

    def recall(self, sample: dict[str, Any]) -> None:
        """Count the score of a sample that an earlier run finished."""
        self._scores.append(sample["score"])
        self._failed += sample["error"] is not None

    def finish(self, sample: dict[str, Any], run: Run | None) -> None:
        """Count a newly finished sample, and remove its search from the running ones."""
        self.running.discard(run)
        self.recall(sample)
        self.done += 1
        self._tokens += tokens_of(sample)
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
