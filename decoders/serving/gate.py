"""Admission control: limits the concurrent and the waiting requests. Uses no HTTP except the statuses of its errors."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from tot.decoders.serving.errors import ServingError
from tot.decoders.serving.options import Limits

_RETRY_AFTER = 1


class Gate:
    """Admits requests up to a limit, queues further ones in order of arrival, and rejects those beyond the queue."""

    def __init__(self, limits: Limits) -> None:
        self.running = 0
        self.waiting = 0
        self.closed = False
        """No new requests are admitted; waiting requests still are."""
        self._limits = limits
        self._slots = asyncio.Semaphore(limits.concurrency)

    @asynccontextmanager
    async def passed(self) -> AsyncIterator[float]:
        """Hold a slot and yield the remaining seconds of the time limit.

        Raises ServingError: 429 if the queue is full, 503 after the time limit or if the gate is closed.
        """
        if self.closed:
            raise closing()
        limits = self._limits
        if self._slots.locked() and self.waiting >= limits.queue:
            raise ServingError(
                429,
                f"the queue is full ({self.running} requests are running and {self.waiting} are waiting): retry later",
                code="queue_full",
                retry_after=_RETRY_AFTER,
            )
        clock = asyncio.get_running_loop().time
        arrived = clock()
        self.waiting += 1
        try:
            async with asyncio.timeout(limits.timeout):
                await self._slots.acquire()
        except TimeoutError:
            raise late(limits) from None
        finally:
            self.waiting -= 1
        self.running += 1
        try:
            yield limits.timeout - (clock() - arrived)
        finally:
            self.running -= 1
            self._slots.release()


def late(limits: Limits) -> ServingError:
    return ServingError(
        503,
        f"nothing was decoded within {limits.timeout:g} seconds: retry later",
        code="timeout",
        retry_after=_RETRY_AFTER,
    )


def closing() -> ServingError:
    return ServingError(503, "the server is stopping: retry later", code="stopping", retry_after=_RETRY_AFTER)
