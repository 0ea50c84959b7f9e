"""LoopThread: an event loop in a thread of its own, which outlives the loops of those who wait for it.

So a decoder's connections serve scripts, notebooks and one search after another, each with a loop of its own.
"""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, suppress
from typing import TYPE_CHECKING, Any, TypeVar

from tot.decoders.errors import RequestError

if TYPE_CHECKING:
    from anyio.from_thread import BlockingPortal

_T = TypeVar("_T")


class LoopThread:
    """Starts with its first work; ends when it is closed, collected, or at the interpreter's end."""

    def __init__(self, last: Callable[[], Awaitable[object]]) -> None:
        """`last` is awaited before the loop ends."""
        self._last = last
        self._lock = threading.Lock()
        self._portal: BlockingPortal | None = None
        self._closed = False
        self._under_way: set[Future[Any]] = set()
        self._finalizer: weakref.finalize[..., LoopThread] | None = None

    def wait(self, work: Callable[[], Awaitable[_T]]) -> _T:
        """What the work comes to. Interrupted, it is cancelled."""
        future = self._start(work)
        try:
            return future.result()
        finally:
            future.cancel()

    async def when_done(self, work: Callable[[], Awaitable[_T]]) -> _T:
        """The same in another event loop; cancelling this cancels the work."""
        return await asyncio.wrap_future(self._start(work))

    def _start(self, work: Callable[[], Awaitable[_T]]) -> Future[_T]:
        from anyio.from_thread import start_blocking_portal

        with self._lock:
            if self._closed:
                raise RequestError("this decoder is closed: make a new one")
            if self._portal is None:
                opened = start_blocking_portal(name="tot-remote")
                self._portal = opened.__enter__()
                self._finalizer = weakref.finalize(self, _end, opened, self._portal, self._last, self._under_way)
            future = self._portal.start_task_soon(work)
        self._under_way.add(future)
        future.add_done_callback(self._under_way.discard)
        return future

    def close(self) -> None:
        """Cancel what is under way, and end the thread."""
        with self._lock:
            self._closed = True
        if self._finalizer is not None:
            self._finalizer()


def _end(
    opened: AbstractContextManager[BlockingPortal],
    portal: BlockingPortal,
    last: Callable[[], Awaitable[object]],
    under_way: set[Future[Any]],
) -> None:
    with suppress(RuntimeError):  # collected in the loop's own thread, where nothing can wait for it
        for future in list(under_way):
            future.cancel()
        portal.call(last)
        portal.call(portal.stop, True)
        opened.__exit__(None, None, None)


async def together(works: Sequence[Callable[[], Coroutine[Any, Any, _T]]]) -> list[_T]:
    """What all works come to, in order. Where one fails, or this is cancelled, the others are cancelled first."""
    tasks = [asyncio.ensure_future(work()) for work in works]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
