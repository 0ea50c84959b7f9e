"""Gate: how many requests at once, and how long they wait. Knows no HTTP but the statuses of what it refuses."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from tot.decoders.serving.errors import ServingError
from tot.decoders.serving.options import Limits

_RETRY_AFTER = 1


class Gate:
    """How many requests are decoded at once, how many wait, and which are refused. First come, first served."""

    def __init__(self, limits: Limits) -> None:
        self.running = 0
        self.waiting = 0
        self.closed = False
        """Nobody new is let in; those that wait already will be."""
        self._limits = limits
        self._places = asyncio.Semaphore(limits.concurrency)

    @asynccontextmanager
    async def passed(self) -> AsyncIterator[float]:
        """Holds a place; gives the seconds left of the time limit. Raises ServingError: 429 full, 503 late, closed."""
        if self.closed:
            raise closing()
        limits = self._limits
        if self._places.locked() and self.waiting >= limits.queue:
            raise ServingError(
                429,
                f"{self.running} requests are being decoded and {self.waiting} wait, which is all that may: try later",
                code="queue_full",
                retry_after=_RETRY_AFTER,
            )
        clock = asyncio.get_running_loop().time
        arrived = clock()
        self.waiting += 1
        try:
            async with asyncio.timeout(limits.timeout):
                await self._places.acquire()
        except TimeoutError:
            raise late(limits) from None
        finally:
            self.waiting -= 1
        self.running += 1
        try:
            yield limits.timeout - (clock() - arrived)
        finally:
            self.running -= 1
            self._places.release()


def late(limits: Limits) -> ServingError:
    return ServingError(
        503,
        f"nothing was decoded within {limits.timeout:g} seconds: try later",
        code="timeout",
        retry_after=_RETRY_AFTER,
    )


def closing() -> ServingError:
    return ServingError(503, "the server is stopping: try another, or later", code="stopping", retry_after=_RETRY_AFTER)
