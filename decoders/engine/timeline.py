"""Who did what when: spans of seconds in lanes, and a queue's length, for pictures of a run."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Span:
    lane: str
    """"target", or a branch's drafts."""
    kind: str
    """"draft", "verify", "sampling"."""
    began: float
    ended: float
    """Seconds on the timeline's clock."""
    branch: int | None = None
    """Whose drafting or verification it was, where it was of one branch."""


@dataclass
class Timeline:
    """Recorded while an engine has one: `engine.timeline = Timeline()`."""

    clock: Callable[[], float] = time.perf_counter
    spans: list[Span] = field(default_factory=list)
    queue: list[tuple[float, int]] = field(default_factory=list)
    """(second, length) whenever the queue of drafts to be verified changed."""

    @contextmanager
    def span(self, lane: str, kind: str, branch: int | None = None) -> Iterator[None]:
        began = self.clock()
        yield
        self.spans.append(Span(lane, kind, began, self.clock(), branch))

    def busy(self, lane: str, windows: int = 50) -> list[float]:
        """Which share of each of `windows` equal parts of the run a lane was at work in."""
        if not self.spans:
            return []
        first = min(span.began for span in self.spans)
        width = (max(span.ended for span in self.spans) - first) / windows
        shares = [0.0] * windows
        for span in self.spans:
            if span.lane != lane or width <= 0:
                continue
            for window in range(int((span.began - first) / width), min(windows, int((span.ended - first) / width) + 1)):
                begins = first + window * width
                shares[window] += max(0.0, min(span.ended, begins + width) - max(span.began, begins)) / width
        return shares
