"""Timelines for charts of a run: spans of time in lanes, and the length of a queue."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np


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

    def busy(self, lane: str, windows: int = 50) -> list[float]:
        """Return the fraction of time that a lane was busy, in each of `windows` equal parts of the run."""
        if not self.spans:
            return []
        edges = np.linspace(min(s.began for s in self.spans), max(s.ended for s in self.spans), windows + 1)
        times = np.array([(s.began, s.ended) for s in self.spans if s.lane == lane]).reshape(-1, 2, 1)
        within = np.minimum(times[:, 1], edges[1:]) - np.maximum(times[:, 0], edges[:-1])
        shares: list[float] = (within.clip(min=0).sum(0) / max(edges[1] - edges[0], 1e-12)).tolist()
        return shares
