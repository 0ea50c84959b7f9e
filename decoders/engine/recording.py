"""Detailed recording of one engine: a timeline whose lane "engine" holds nested spans.

    run                all steps; time outside of steps is waiting, and work of other threads
      step             time outside of its parts is scheduling; its load describes the forward
        draft          drafting before the forward, or waiting for a draft
        forward
          attention, linear, …
        sampling
        commit         policies accepting tokens, with stop strings and text

Attention and linear layers are parts only in the C backend.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from tot.decoders.engine.engine import Engine
from tot.decoders.errors import TotError
from tot.decoders.timeline import LANE, Span, Timeline


@contextmanager
def recording(engine: Engine) -> Iterator[Timeline]:
    """Record the engine's work on a new timeline. Raises RequestError if the engine is closed."""
    timeline = Timeline(detailed=True)
    began = 0.0

    def start() -> None:
        nonlocal began
        engine.timeline = timeline
        began = timeline.clock()

    def stop() -> None:
        timeline.spans.append(Span(LANE, "run", began, timeline.clock()))
        engine.timeline = None

    engine.call(start)  # between two steps
    try:
        yield timeline
    finally:
        try:
            engine.call(stop)
        except TotError:  # closed or failed: no more steps will run
            stop()
