"""Run a coroutine to its end from code that is not asynchronous, in a script or inside a running event loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

_T = TypeVar("_T")


def run_to_end(coroutine: Coroutine[Any, Any, _T]) -> _T:
    """Run to the end, in a thread of its own where this one has an event loop running."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(coroutine)
    result: Future[_T] = Future()
    loop = asyncio.new_event_loop()
    task = loop.create_task(coroutine)

    def work() -> None:
        try:
            result.set_result(loop.run_until_complete(task))
        except BaseException as error:  # handed to the caller's thread  # noqa: BLE001
            result.set_exception(error)
        finally:
            loop.close()

    threading.Thread(target=work, name="tot-solve", daemon=True).start()
    try:
        return result.result()
    except KeyboardInterrupt:
        loop.call_soon_threadsafe(task.cancel)
        return result.result()
