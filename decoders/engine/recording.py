"""A detailed recording of one engine: a timeline whose lane "engine" has spans in spans.

    run                from one step to another: what is in no step is waiting, and the work of others
      step             what is in no part of it is scheduling; its load says what the forward computed
        draft          drafting before it, or waiting for a draft
        forward
          attention, linear, …
        sampling
        commit         policies taking tokens, with stop strings and text

Where nothing is recorded, nothing is wrapped.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface

from tot.decoders.engine.engine import Engine
from tot.decoders.errors import TotError
from tot.decoders.kernels.attention import ATTENTION, packed_attention
from tot.decoders.timeline import LANE, Span, Timeline, timed


@contextmanager
def recording(engine: Engine, timeline: Timeline | None = None) -> Iterator[Timeline]:
    """Record what the engine does, on a new timeline or a given one. Takes a few percent of the time.

    On a GPU each part is waited for, so that it gets its own time. Raises RequestError where the engine is closed.
    """
    timeline = timeline or Timeline(clock_of(engine.runner.device), detailed=True)
    wrapped: list[tuple[nn.Linear, Any, Any]] = []
    began = 0.0

    def start() -> None:
        nonlocal began
        module = engine.runner.backend.module  # C records its parts itself
        for layer in () if module is None else module.modules():
            if isinstance(layer, nn.Linear):
                own, ours = vars(layer).get("forward"), timed("linear", layer.forward)
                layer.forward = ours  # type: ignore[method-assign]
                wrapped.append((layer, own, ours))
        _time_attention(+1)
        engine.timeline = timeline
        began = timeline.clock()

    def stop() -> None:
        timeline.spans.append(Span(LANE, "run", began, timeline.clock()))
        engine.timeline = None
        _time_attention(-1)
        for layer, own, ours in wrapped:
            if vars(layer).get("forward") is ours:  # the engine may have given layers back meanwhile
                del layer.forward
                if own is not None:
                    layer.forward = own  # type: ignore[method-assign]

    engine.call(start)  # between two steps
    try:
        yield timeline
    finally:
        try:
            engine.call(stop)
        except TotError:  # closed or broken meanwhile: there are no more steps
            stop()


_under_way = [0]
_counting = threading.Lock()


def _time_attention(more: int) -> None:
    """Time attention, which all models of a process share, while any recording is under way."""
    with _counting:
        before, _under_way[0] = _under_way[0], _under_way[0] + more
        if not before or not _under_way[0]:
            AttentionInterface.register(
                ATTENTION, timed("attention", packed_attention) if _under_way[0] else packed_attention
            )


def clock_of(device: torch.device) -> Callable[[], float]:
    """Seconds when all that was asked of the device is done."""
    return partial(_synchronized, device) if device.type == "cuda" else time.perf_counter


def _synchronized(device: torch.device) -> float:
    torch.cuda.synchronize(device)
    return time.perf_counter()
