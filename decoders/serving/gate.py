"""Admission control: limits the concurrent and the waiting requests. Uses no HTTP except the statuses of its errors."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from tot.decoders.serving.errors import ServingError, retry_later
from tot.decoders.serving.limits import Limits


class Gate:
    """Admits requests up to `slots` and queues further ones. A free slot goes to the client with the fewest running.

    Clients whose requests wait share the queue: none can fill it for the others.
    """

    def __init__(self, slots: int, limits: Limits) -> None:
        self.closed = False
        """No new requests are admitted; waiting requests still are."""
        self._slots = slots
        self._limits = limits
        self._running: Counter[str] = Counter()
        self._waiting: list[tuple[str, asyncio.Future[None]]] = []
        """Client and turn of each waiting request, in order of arrival."""

    @property
    def running(self) -> int:
        return self._running.total()

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @asynccontextmanager
    async def passed(self, client: str) -> AsyncIterator[float]:
        """Hold a slot and yield the remaining seconds of the time limit.

        Raises ServingError: 429 if the client's share of the queue is full, 503 after the time limit or if the gate is
        closed.
        """
        if self.closed:
            raise closing()
        limits, loop = self._limits, asyncio.get_running_loop()
        waiting = Counter(other for other, _ in self._waiting)
        if self.running >= self._slots and waiting[client] >= -(-limits.queue // len({*waiting, client})):
            counts = f"{self.running} requests are running and {self.waiting} are waiting"
            raise retry_later(f"the queue is full ({counts})", "queue_full", 429)
        entry, deadline = (client, loop.create_future()), loop.time() + limits.timeout
        self._waiting.append(entry)
        self._admit()
        try:
            try:
                async with asyncio.timeout_at(deadline):
                    await entry[1]
            except TimeoutError:
                raise late(limits) from None
            yield max(0.0, deadline - loop.time())
        finally:
            if entry in self._waiting:
                self._waiting.remove(entry)
            elif not entry[1].cancelled():
                self._leave(client)

    def _admit(self, last: str | None = None) -> None:
        """Fill the free slots. The client `last`, whose request has just ended, comes after equal ones."""
        while self.running < self._slots and self._waiting:
            entry = min(self._waiting, key=lambda one: self._running[one[0]] + (one[0] == last))
            self._waiting.remove(entry)
            client, turn = entry
            if not turn.done():  # not cancelled
                self._running[client] += 1
                turn.set_result(None)

    def _leave(self, client: str) -> None:
        self._running[client] -= 1
        self._running += Counter()  # forget clients without requests
        self._admit(client)


def late(limits: Limits) -> ServingError:
    return retry_later(f"nothing was decoded within {limits.timeout:g} seconds", "timeout")


def closing() -> ServingError:
    return retry_later("the server is stopping", "stopping")
