"""Who did what when: spans of seconds in lanes, and a queue's length, for pictures and profiles of a run.

What a thread is at within a step of the engine is said by `with span("attention"): ...`, which is free unless that step
is recorded in detail.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, NamedTuple, ParamSpec, TypeVar

import numpy as np

LANE = "engine"
"""Where on a timeline the spans of steps are."""

_P = ParamSpec("_P")
_T = TypeVar("_T")
_NOTHING = nullcontext()


class Load(NamedTuple):
    """What a forward computed."""

    rows: Mapping[tuple[str, str], int]
    """By purpose and kind: "prefill" (of prompts), "verify" (of texts that are drafted for), "decode" (of others)."""
    reads: int
    """Rows whose logits were read."""
    keys: int
    """Pairs of a row and a key that it sees."""
    slots: int
    """Keys that any row sees, each once."""


class Span(NamedTuple):
    lane: str
    """"target", or a branch's drafts; "engine" for what the step loop did, spans in spans, on a detailed timeline."""
    kind: str
    """"draft", "verify", "sampling"; in a lane of spans in spans also others (see `recording.py`)."""
    began: float
    ended: float
    """Seconds on the timeline's clock."""
    branch: int | None = None
    """Whose drafting or verification it was, where it was of one branch."""
    load: Load | None = None
    """Of a step: what its forward computed."""


@dataclass
class Timeline:
    """Recorded while an engine has one: `engine.timeline = Timeline()`."""

    clock: Callable[[], float] = time.perf_counter
    spans: list[Span] = field(default_factory=list)
    queue: list[tuple[float, int]] = field(default_factory=list)
    """(second, length) whenever the queue of drafts to be verified changed."""
    detailed: bool = False
    """Steps and their parts are recorded too, in the lane "engine"."""

    @contextmanager
    def span(self, lane: str, kind: str, branch: int | None = None) -> Iterator[None]:
        began = self.clock()
        yield
        self.spans.append(Span(lane, kind, began, self.clock(), branch))

    def busy(self, lane: str, windows: int = 50) -> list[float]:
        """Which share of each of `windows` equal parts of the run a lane was at work in."""
        if not self.spans:
            return []
        edges = np.linspace(min(s.began for s in self.spans), max(s.ended for s in self.spans), windows + 1)
        times = np.array([(s.began, s.ended) for s in self.spans if s.lane == lane]).reshape(-1, 2, 1)
        within = np.minimum(times[:, 1], edges[1:]) - np.maximum(times[:, 0], edges[:-1])
        shares: list[float] = (within.clip(min=0).sum(0) / max(edges[1] - edges[0], 1e-12)).tolist()
        return shares

    def exclusive(self, lane: str) -> Iterator[tuple[tuple[Span, ...], float]]:
        """Each span of a lane, after those that it lies in, and its seconds without those that lie in it."""
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
        """In order of their beginnings; of spans that are the same time, the one recorded last holds the others."""
        return sorted(
            (span for span in reversed(self.spans) if span.lane == lane), key=lambda span: (span.began, -span.ended)
        )

    def events(self) -> list[dict[str, Any]]:
        """Chrome's trace events, which Perfetto opens: a thread a lane, a counter for the queue; microseconds."""
        lanes = list(dict.fromkeys(span.lane for span in self.spans))
        names = [
            {"name": "thread_name", "ph": "M", "ts": 0, "pid": 0, "tid": tid, "args": {"name": lane}}
            for tid, lane in enumerate(lanes)
        ]
        first = min([*(span.began for span in self.spans), *(second for second, _ in self.queue)], default=0.0)

        def microseconds(second: float) -> float:
            return round((second - first) * 1e6, 3)

        made: list[dict[str, Any]] = []
        for tid, lane in enumerate(lanes):
            for span in self._outermost_first(lane):
                ts = microseconds(span.began)
                dur = round(microseconds(span.ended) - ts, 3)
                event = {"name": span.kind, "ph": "X", "ts": ts, "dur": dur, "pid": 0, "tid": tid}
                made.append(event | _described(span))
        for second, length in self.queue:
            event = {"name": "queue", "ph": "C", "ts": microseconds(second), "pid": 0, "tid": 0}
            made.append(event | {"args": {"drafts": length}})
        return names + sorted(made, key=lambda event: event["ts"])


def _described(span: Span) -> dict[str, Any]:
    """What is known of a span besides its time, as an event's arguments."""
    if span.load is None:
        return {} if span.branch is None else {"args": {"branch": span.branch}}
    rows = {f"{purpose}, {kind}": count for (purpose, kind), count in span.load.rows.items()}
    return {"args": {"rows": rows, **{name: getattr(span.load, name) for name in ("reads", "keys", "slots")}}}


_recorded_on: ContextVar[Timeline | None] = ContextVar("tot_timeline", default=None)


def span(kind: str) -> AbstractContextManager[None]:
    """A span of the step that this thread is in, if that is recorded in detail."""
    timeline = _recorded_on.get()
    return _NOTHING if timeline is None else timeline.span(LANE, kind)


def add_spans(seconds: Mapping[str, float]) -> None:
    """Spans that end now, end to end, whose seconds by kind were counted elsewhere (in C, say)."""
    timeline = _recorded_on.get()
    if timeline is None:
        return
    began = timeline.clock() - sum(seconds.values())
    for kind, took in seconds.items():
        timeline.spans.append(Span(LANE, kind, began, began + took))
        began += took


def timed(kind: str, function: Callable[_P, _T]) -> Callable[_P, _T]:
    """The function, each call of it a span."""

    @functools.wraps(function)
    def run(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        with span(kind):
            return function(*args, **kwargs)

    return run


@contextmanager
def recorded(timeline: Timeline | None) -> Iterator[None]:
    """Has this thread's spans recorded on the timeline, if it is a detailed one."""
    if timeline is None or not timeline.detailed:
        yield
        return
    token = _recorded_on.set(timeline)
    try:
        yield
    finally:
        _recorded_on.reset(token)
