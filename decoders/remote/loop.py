"""An event loop in a separate thread, which outlives the event loops of its callers.

This keeps the connections of a decoder open across scripts, notebooks and searches, each with its own event loop.
"""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

from tot.decoders.errors import RequestError

_T = TypeVar("_T")
_Work = Callable[[], Coroutine[Any, Any, _T]]


class LoopThread:
    """Starts with its first work; ends when it is closed or garbage-collected, or when the interpreter exits."""

    def __init__(self, last: _Work[None]) -> None:
        """`last` is awaited before the loop ends."""
        self._cleanup = last
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._closed = False
        self._finalizer: weakref.finalize[..., LoopThread] | None = None

    def wait(self, work: _Work[_T]) -> _T:
        """Run the work and return its result. An interrupt cancels the work."""
        future = self._start(work)
        try:
            return future.result()
        finally:
            future.cancel()

    async def when_done(self, work: _Work[_T]) -> _T:
        """Run the work and await its result from another event loop. Cancellation cancels the work."""
        return await asyncio.wrap_future(self._start(work))

    def _start(self, work: _Work[_T]) -> Future[_T]:
        with self._lock:
            if self._closed:
                raise RequestError("this decoder is closed: make a new one")
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                thread = threading.Thread(target=self._loop.run_forever, name="tot-remote", daemon=True)
                thread.start()
                self._finalizer = weakref.finalize(self, _end, self._loop, thread, self._cleanup)
            return asyncio.run_coroutine_threadsafe(work(), self._loop)

    def close(self) -> None:
        """Cancel the work in progress and end the thread."""
        with self._lock:
            self._closed = True
        if self._finalizer is not None:
            self._finalizer()


def _end(loop: asyncio.AbstractEventLoop, thread: threading.Thread, cleanup: _Work[None]) -> None:
    async def finish() -> None:
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        await cleanup()

    finishing = asyncio.run_coroutine_threadsafe(finish(), loop)
    finishing.add_done_callback(lambda _: loop.call_soon_threadsafe(loop.stop))
    if threading.current_thread() is not thread:  # garbage collection may run in the thread, which cannot join itself
        thread.join()
        loop.close()


async def together(works: Sequence[_Work[_T]]) -> list[_T]:
    """Run works concurrently and return their results in order. A failure or cancellation cancels the other works."""
    tasks = [asyncio.ensure_future(work()) for work in works]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
