"""Timelines for charts and profiles of a run: spans of time in lanes, and the length of a queue.

Code in a step of the engine records a span with `with span("attention"): ...`, which costs nothing unless the timeline
is detailed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

LANE = "engine"
"""The lane of the engine's steps."""

_NOTHING = nullcontext()


class Load(NamedTuple):
    """The work of a forward pass."""

    rows: Mapping[tuple[str, str], int]
    """Rows by purpose and kind: "prefill" (prompts), "verify" (texts with drafts), "decode" (other texts)."""
    reads: int
    """Rows whose logits were read."""
    keys: int
    """Pairs of a row and a key that it attends to."""
    slots: int
    """Distinct keys that any row attends to."""


class Span(NamedTuple):
    lane: str
    """"target", or the drafts of a branch; on a detailed timeline also "engine", for nested spans of the step loop."""
    kind: str
    """"draft", "verify", "sampling"; in the lane "engine" also others (see `recording.py`)."""
    began: float
    ended: float
    """Seconds on the timeline's clock."""
    branch: int | None = None
    """The branch of a draft or verification, if it was for one branch."""
    load: Load | None = None
    """The work of the forward pass, for the span of a step."""


@dataclass
class Timeline:
    """A recording of an engine's work, active while it is assigned: `engine.timeline = Timeline()`."""

    clock: Callable[[], float] = time.perf_counter
    spans: list[Span] = field(default_factory=list)
    queue: list[tuple[float, int]] = field(default_factory=list)
    """(second, length) at each change of the queue of unverified drafts."""
    detailed: bool = False
    """Also record steps and their parts, in the lane "engine"."""

    @contextmanager
    def span(self, lane: str, kind: str, branch: int | None = None) -> Iterator[None]:
        began = self.clock()
        yield
        self.spans.append(Span(lane, kind, began, self.clock(), branch))

    def busy(self, lane: str, windows: int = 50) -> list[float]:
        """Return the fraction of time that a lane was busy, in each of `windows` equal parts of the run."""
        if not self.spans:
            return []
        edges = np.linspace(min(s.began for s in self.spans), max(s.ended for s in self.spans), windows + 1)
        times = np.array([(s.began, s.ended) for s in self.spans if s.lane == lane]).reshape(-1, 2, 1)
        within = np.minimum(times[:, 1], edges[1:]) - np.maximum(times[:, 0], edges[:-1])
        shares: list[float] = (within.clip(min=0).sum(0) / max(edges[1] - edges[0], 1e-12)).tolist()
        return shares

    def exclusive(self, lane: str) -> Iterator[tuple[tuple[Span, ...], float]]:
        """Yield each span of a lane, preceded by its enclosing spans, with its seconds excluding nested spans."""
        path: list[Span] = []
        within: list[float] = []
        for span in [*self._outermost_first(lane), None]:
            while path and (span is None or path[-1].ended <= span.began):
                seconds = path[-1].ended - path[-1].began
                yield tuple(path), seconds - within.pop()
                path.pop()
                if within:
                    within[-1] += seconds
            if span is not None:
                path.append(span)
                within.append(0.0)

    def _outermost_first(self, lane: str) -> list[Span]:
        """Return spans in order of start. Of spans with equal times, the one recorded last encloses the others."""
        return sorted(
            (span for span in reversed(self.spans) if span.lane == lane), key=lambda span: (span.began, -span.ended)
        )

    def events(self) -> list[dict[str, Any]]:
        """Return Chrome trace events, readable by Perfetto: a thread per lane, a counter for the queue; times in µs."""
        lanes = list(dict.fromkeys(span.lane for span in self.spans))
        names = [
            {"name": "thread_name", "ph": "M", "ts": 0, "pid": 0, "tid": tid, "args": {"name": lane}}
            for tid, lane in enumerate(lanes)
        ]
        first = min([*(span.began for span in self.spans), *(second for second, _ in self.queue)], default=0.0)

        def microseconds(second: float) -> float:
            return round((second - first) * 1e6, 3)

        events: list[dict[str, Any]] = []
        for tid, lane in enumerate(lanes):
            for span in self._outermost_first(lane):
                ts = microseconds(span.began)
                dur = round(microseconds(span.ended) - ts, 3)
                event = {"name": span.kind, "ph": "X", "ts": ts, "dur": dur, "pid": 0, "tid": tid}
                events.append(event | _span_args(span))
        for second, length in self.queue:
            event = {"name": "queue", "ph": "C", "ts": microseconds(second), "pid": 0, "tid": 0}
            events.append(event | {"args": {"drafts": length}})
        return names + sorted(events, key=lambda event: event["ts"])


def _span_args(span: Span) -> dict[str, Any]:
    """Return the arguments of a span's trace event."""
    if span.load is None:
        return {} if span.branch is None else {"args": {"branch": span.branch}}
    rows = {f"{purpose}, {kind}": count for (purpose, kind), count in span.load.rows.items()}
    return {"args": {"rows": rows, **{name: getattr(span.load, name) for name in ("reads", "keys", "slots")}}}


_current_timeline: ContextVar[Timeline | None] = ContextVar("tot_timeline", default=None)


def span(kind: str) -> AbstractContextManager[None]:
    """Record a span of this thread's step, if the timeline is detailed."""
    timeline = _current_timeline.get()
    return _NOTHING if timeline is None else timeline.span(LANE, kind)


def add_spans(seconds: Mapping[str, float]) -> None:
    """Record consecutive spans that end now. Their seconds by kind were measured elsewhere, such as in C."""
    timeline = _current_timeline.get()
    if timeline is None:
        return
    began = timeline.clock() - sum(seconds.values())
    for kind, duration in seconds.items():
        timeline.spans.append(Span(LANE, kind, began, began + duration))
        began += duration


@contextmanager
def recorded(timeline: Timeline | None) -> Iterator[None]:
    """Record this thread's spans on the timeline, if it is detailed."""
    if timeline is None or not timeline.detailed:
        yield
        return
    token = _current_timeline.set(timeline)
    try:
        yield
    finally:
        _current_timeline.reset(token)
