"""Detailed recording of one engine: a timeline whose lane "engine" holds nested spans.

    run                all steps; time outside of steps is waiting, and work of other threads
      step             time outside of its parts is scheduling; its load describes the forward
        draft          drafting before the forward, or waiting for a draft
        forward
          attention, linear, …
        sampling
        commit         policies accepting tokens, with stop strings and text

Layers are wrapped only during a recording.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from tot.decoders.engine.engine import Engine
from tot.decoders.errors import TotError
from tot.decoders.timeline import LANE, Span, Timeline, timed


@contextmanager
def recording(engine: Engine) -> Iterator[Timeline]:
    """Record the engine's work on a new timeline. Costs a few percent of the time.

    On a GPU, each part is synchronized to get its own time. Raises RequestError if the engine is closed.
    """
    timeline = Timeline(clock_of(engine.runner.device), detailed=True)
    wrapped: list[tuple[Any, Any, Any]] = []
    began = 0.0

    def start() -> None:
        nonlocal began
        module = engine.runner.backend.module  # the C backend records its own parts
        for layer in () if module is None else module.modules():
            if isinstance(layer, sys.modules["torch"].nn.Linear):
                original, wrapper = vars(layer).get("forward"), timed("linear", layer.forward)
                layer.forward = wrapper
                wrapped.append((layer, original, wrapper))
        _time_attention(+1)
        engine.timeline = timeline
        began = timeline.clock()

    def stop() -> None:
        timeline.spans.append(Span(LANE, "run", began, timeline.clock()))
        engine.timeline = None
        _time_attention(-1)
        for layer, original, wrapper in wrapped:
            if vars(layer).get("forward") is wrapper:  # the engine may have restored the layer
                del layer.forward
                if original is not None:
                    layer.forward = original

    engine.call(start)  # between two steps
    try:
        yield timeline
    finally:
        try:
            engine.call(stop)
        except TotError:  # closed or failed: no more steps will run
            stop()


_active = [0]
_counting = threading.Lock()


def _time_attention(change: int) -> None:
    """Time attention while any recording is active, because all models of a process share it."""
    with _counting:
        before, _active[0] = _active[0], _active[0] + change
        if not before or not _active[0]:
            from transformers import AttentionInterface

            from tot.decoders.kernels.attention import ATTENTION, packed_attention

            AttentionInterface.register(
                ATTENTION, timed("attention", packed_attention) if _active[0] else packed_attention
            )


def clock_of(device: str) -> Callable[[], float]:
    """Return a clock in seconds that first waits for all work queued on the device."""
    return partial(_synchronized, device) if device != "cpu" else time.perf_counter


def _synchronized(device: str) -> float:
    import torch

    torch.cuda.synchronize(device)
    return time.perf_counter()
