"""An event loop in a separate thread, which outlives the event loops of its callers.

This keeps the connections of a decoder open across scripts, notebooks and searches, each with its own event loop.
"""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

from tot.decoders.errors import RequestError

_T = TypeVar("_T")
_Work = Callable[[], Coroutine[Any, Any, _T]]


class LoopThread:
    """Ends when it is closed or garbage-collected, or when the interpreter exits."""

    def __init__(self, cleanup: _Work[None]) -> None:
        """`cleanup` is awaited before the loop ends."""
        self._loop = asyncio.new_event_loop()
        self._lock = threading.Lock()
        thread = threading.Thread(target=self._loop.run_forever, name="tot-remote", daemon=True)
        thread.start()
        self._end = weakref.finalize(self, _end, self._loop, thread, cleanup)

    def submit(self, work: _Work[_T]) -> Future[_T]:
        """Start the work. Cancelling the future cancels it. Raises RequestError after `close`."""
        with self._lock:
            if not self._end.alive:
                raise RequestError("this decoder is closed: make a new one")
            return asyncio.run_coroutine_threadsafe(work(), self._loop)

    def wait(self, work: _Work[_T]) -> _T:
        """Run the work and return its result. An interrupt cancels the work."""
        future = self.submit(work)
        try:
            return future.result()
        finally:
            future.cancel()

    def close(self) -> None:
        """Cancel the work in progress and end the thread."""
        with self._lock:
            self._end()


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


async def together(works: Sequence[Callable[[], Awaitable[_T]]]) -> list[_T]:
    """Run works concurrently and return their results in order. A failure or cancellation cancels the other works."""
    tasks = [asyncio.ensure_future(work()) for work in works]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
