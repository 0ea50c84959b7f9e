"""What a thread is at, within a step of the engine: `with part("attention"): ...`. Free unless it is recorded.

Parts may lie in each other. It knows of no engine: a part goes to the timeline that records the step around it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from typing import ParamSpec, TypeVar

import torch

from tot.decoders.engine.timeline import Span, Timeline

LANE = "engine"
"""Where on a timeline parts are."""

_P = ParamSpec("_P")
_T = TypeVar("_T")
_timeline: ContextVar[Timeline | None] = ContextVar("tot_timeline", default=None)
_NOTHING = nullcontext()


def part(kind: str) -> AbstractContextManager[None]:
    """A span of the step that this thread is in, if that is recorded in detail. None in compiled code."""
    timeline = None if torch.compiler.is_compiling() else _timeline.get()
    return _NOTHING if timeline is None else timeline.span(LANE, kind)


def counted(seconds: Mapping[str, float]) -> None:
    """Parts of the time until now, whose seconds were counted elsewhere (in C, say): a span each, end to end."""
    timeline = _timeline.get()
    if timeline is None:
        return
    began = timeline.clock() - sum(seconds.values())
    for kind, took in seconds.items():
        timeline.spans.append(Span(LANE, kind, began, began + took))
        began += took


def timed(kind: str, function: Callable[_P, _T]) -> Callable[_P, _T]:
    """The function, each call of it a part."""

    @functools.wraps(function)
    def run(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        with part(kind):
            return function(*args, **kwargs)

    return run


@contextmanager
def recorded(timeline: Timeline | None) -> Iterator[None]:
    """Has this thread's parts recorded on the timeline, if it is a detailed one."""
    if timeline is None or not timeline.detailed:
        yield
        return
    token = _timeline.set(timeline)
    try:
        yield
    finally:
        _timeline.reset(token)
