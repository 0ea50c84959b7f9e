"""Solutions or thoughts in progress: start some, return them as they end, and cancel the unfinished ones."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from tot.decoders.request import Purpose
from tot.llm.replies import Proposal

Sampling = Callable[[int], Coroutine[Any, Any, Proposal]]
"""Samples the solution or thought of a number."""


class InProgress:
    """The solutions or thoughts that a search has requested and not yet received.

    With `ordered`, a call waits for all of them, so that the results do not depend on timing.
    """

    def __init__(self, ordered: bool = False) -> None:
        self._ordered = ordered
        self._requested = 0
        self._waiting: set[int] = set()
        """Numbers that were requested and not started: their process was killed, or the next call starts them."""
        self._running: dict[asyncio.Task[Proposal], int] = {}
        self._purpose: Purpose = "generate"

    async def advance(self, count: int, purpose: Purpose, sampling: Sampling) -> list[Proposal]:
        """Request `count` more solutions. Return the ended ones, by number: at least one if any is in progress.

        Cancels the unfinished ones of another purpose. Raises the error of the first solution that fails.
        """
        if purpose != self._purpose:
            await self.cancel()
        self._request(count, purpose)
        for number in sorted(self._waiting):
            self._running[asyncio.create_task(sampling(number))] = number
        self._waiting.clear()
        if not self._running:
            return []
        when = asyncio.ALL_COMPLETED if self._ordered else asyncio.FIRST_COMPLETED
        ended, _ = await asyncio.wait(self._running, return_when=when)
        return await asyncio.gather(*sorted(ended, key=self._running.pop))  # takes the errors of all that fail

    def replay(self, count: int, purpose: Purpose, results: Sequence[Proposal]) -> None:
        """Repeat the bookkeeping of an earlier call. Unfinished solutions start again with the next `advance`."""
        self._request(count, purpose)
        self._waiting -= {proposal.sample for proposal in results}

    async def cancel(self) -> None:
        """Cancel the unfinished solutions."""
        for task in self._running:
            task.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)
        self._running.clear()

    def _request(self, count: int, purpose: Purpose) -> None:
        if purpose != self._purpose:
            self._purpose, self._requested, self._waiting = purpose, 0, set()
        self._waiting |= set(range(self._requested, self._requested + count))
        self._requested += count
