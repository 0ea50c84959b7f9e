"""What a client's connection means for the work done for it: who hangs up is worked for no longer."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from contextlib import suppress
from typing import Any, TypeVar

from starlette.types import Receive

_T = TypeVar("_T")


class HungUpError(Exception):
    """The client is gone: there is nobody to reply to."""


async def while_connected(receive: Receive, work: Coroutine[Any, Any, _T]) -> _T:
    """Do the work, or cancel it when the client hangs up and raise HungUpError. The request's body must be read."""
    doing = asyncio.ensure_future(work)
    watching = asyncio.ensure_future(_hung_up(receive))
    try:
        await asyncio.wait({doing, watching}, return_when=asyncio.FIRST_COMPLETED)
        if not doing.done():
            raise HungUpError
        return doing.result()
    finally:
        for task in (doing, watching):
            if not task.done():
                task.cancel()
                with suppress(asyncio.CancelledError, HungUpError):
                    await task


async def _hung_up(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
