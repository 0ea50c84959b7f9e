"""Timelines for charts of a run: spans of time in lanes, and the length of a queue."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple


class Span(NamedTuple):
    lane: str
    """"target", or the drafts of a branch."""
    kind: str
    """"draft", "verify" or "sampling"."""
    began: float
    ended: float
    """Seconds of `time.perf_counter`."""
    branch: int | None = None
    """The branch of a draft or verification, if it was for one branch."""


@dataclass
class Timeline:
    """A recording of an engine's work, active while it is assigned: `engine.timeline = Timeline()`."""

    spans: list[Span] = field(default_factory=list)
    queue: list[tuple[float, int]] = field(default_factory=list)
    """(second, length) at each change of the queue of unverified drafts."""

    @contextmanager
    def span(self, lane: str, kind: str, branch: int | None = None) -> Iterator[None]:
        began = time.perf_counter()
        yield
        self.spans.append(Span(lane, kind, began, time.perf_counter(), branch))

    def seconds(self) -> dict[str, float]:
        """Return the total seconds of drafting ("draft"), and of the target's forwards ("verify") and "sampling"."""
        total = {"draft": 0.0, "verify": 0.0, "sampling": 0.0}
        for span in self.spans:
            if span.kind == "draft" or span.lane == "target":
                total[span.kind] += span.ended - span.began
        return total
