"""Admission control: limits the concurrent and the waiting requests. Uses no HTTP except the statuses of its errors."""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict, deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from tot.decoders.serving.errors import ServingError
from tot.decoders.serving.options import Limits

_RETRY_AFTER = 1


class Gate:
    """Admits requests up to `slots`. Further ones wait, in a queue for each client, up to the limit of all queues.

    A free slot goes to the client with the fewest running requests. If the queues are full, the client with the most
    waiting requests loses its newest one.
    """

    def __init__(self, slots: int, limits: Limits) -> None:
        self.closed = False
        """No new requests are admitted; waiting requests still are."""
        self._slots = slots
        self._limits = limits
        self._running: Counter[str] = Counter()
        self._queues: defaultdict[str, deque[asyncio.Future[None]]] = defaultdict(deque)
        """The waiting requests by client; the client that was admitted last is the last one."""

    @property
    def running(self) -> int:
        return self._running.total()

    @property
    def waiting(self) -> int:
        return sum(map(len, self._queues.values()))

    @asynccontextmanager
    async def passed(self, client: str = "") -> AsyncIterator[float]:
        """Hold a slot and yield the remaining seconds of the time limit.

        Raises ServingError: 429 if the queues are full, 503 after the time limit or if the gate is closed.
        """
        if self.closed:
            raise closing()
        limits = self._limits
        clock = asyncio.get_running_loop().time
        arrived = clock()
        turn = self._queue(client)
        try:
            async with asyncio.timeout(limits.timeout):
                await turn
        except BaseException as error:
            self._forget(client, turn)
            if isinstance(error, TimeoutError):
                raise late(limits) from None
            raise
        try:
            yield limits.timeout - (clock() - arrived)
        finally:
            self._leave(client)

    def _queue(self, client: str) -> asyncio.Future[None]:
        """Return a future that ends when the client's new request is admitted, or its place in the queue is lost."""
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._queues[client].append(turn)
        self._admit()
        if self.waiting > self._limits.queue:
            busiest = max(self._queues, key=lambda one: (len(self._queues[one]), one == client))
            lost = self._queues[busiest][-1]
            self._forget(busiest, lost)
            lost.set_exception(self._full())
        return turn

    def _full(self) -> ServingError:
        return ServingError(
            429,
            f"the queue is full ({self.running} requests are running and {self.waiting} are waiting): retry later",
            code="queue_full",
            retry_after=_RETRY_AFTER,
        )

    def _admit(self, last: str | None = None) -> None:
        """Fill the free slots. The client `last`, whose request has just ended, comes after equal ones."""
        while self.running < self._slots and self._queues:
            client = min(self._queues, key=lambda one: self._running[one] + (one == last))
            queue = self._queues.pop(client)
            turn = queue.popleft()
            if queue:
                self._queues[client] = queue
            if not turn.done():  # not cancelled
                self._running[client] += 1
                turn.set_result(None)

    def _forget(self, client: str, turn: asyncio.Future[None]) -> None:
        """Remove a request that does not wait any more; free its slot if it was admitted at the same moment."""
        if turn in self._queues.get(client, ()):
            self._queues[client].remove(turn)
            if not self._queues[client]:
                del self._queues[client]
        elif turn.done() and not turn.cancelled() and turn.exception() is None:
            self._leave(client)

    def _leave(self, client: str) -> None:
        self._running[client] -= 1
        self._running += Counter()  # forget clients without requests
        self._admit(client)


def late(limits: Limits) -> ServingError:
    return ServingError(
        503,
        f"nothing was decoded within {limits.timeout:g} seconds: retry later",
        code="timeout",
        retry_after=_RETRY_AFTER,
    )


def closing() -> ServingError:
    return ServingError(503, "the server is stopping: retry later", code="stopping", retry_after=_RETRY_AFTER)
