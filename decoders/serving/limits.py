"""What a server allows: its limits, checked once where it is made, the gate that keeps those on requests at once, and
where its key comes from. Knows no HTTP but the statuses of what is refused, and no decoder.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from tot.decoders.serving.errors import ServingError

KEY_VARIABLE = "TOT_SERVE_KEY"
"""The environment variable that holds the key, if one is wanted."""
_RETRY_AFTER = 1


class Limits(BaseModel):
    """The most that clients may ask for, one by one and together."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    concurrency: Annotated[int, Field(ge=1)] = 64
    """Requests that are decoded at once; more of them wait."""
    queue: Annotated[int, Field(ge=0)] = 256
    """Requests that may wait; more of them are refused (429)."""
    max_tokens: Annotated[int, Field(ge=1)] = 2048
    """New tokens of any text, and what a chat gets that doesn't say."""
    max_prompt_tokens: Annotated[int, Field(ge=1)] | None = None
    """None: as the model's context and the store of keys and values allow."""
    max_samples: Annotated[int, Field(ge=1)] = 128
    """Texts of one request: prompts times n."""
    timeout: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 600.0
    """Seconds from a request's arrival. What was written by then is the reply, ended by "length"; 503 where that is
    nothing."""
    max_body: Annotated[int, Field(ge=1)] = 2**20
    """Bytes of a request's body; more are refused (413)."""
    body_timeout: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 30.0
    """Seconds in which a body has to arrive whole (408)."""
    grace: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 30.0
    """Seconds that running requests have to end when the server is told to stop."""


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
