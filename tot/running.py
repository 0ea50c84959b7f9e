"""Run a coroutine to its end from code that is not asynchronous, in a script or inside a running event loop."""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

_T = TypeVar("_T")


async def _interruptible(coroutine: Coroutine[Any, Any, _T]) -> _T:
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None
    received: list[int] = []
    handled: list[signal.Signals] = []

    def stop(number: int) -> None:
        if not received:  # others may follow at once: two signals, or a terminal's to the whole group
            task.cancel()
        received.append(number)

    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            ours = number == signal.SIGINT or signal.getsignal(number) is signal.SIG_DFL
            if ours and signal.getsignal(number) is not signal.SIG_IGN:
                loop.add_signal_handler(number, stop, number)
                handled.append(number)
    try:
        return await coroutine
    except asyncio.CancelledError:
        if received:
            raise KeyboardInterrupt(received[0]) from None
        raise
    finally:
        for number in handled:
            loop.remove_signal_handler(number)


def run_to_end(coroutine: Coroutine[Any, Any, _T]) -> _T:
    """Run to the end, in a thread of its own where this one has an event loop running.

    Ctrl-C, SIGTERM and SIGHUP cancel the coroutine, once. KeyboardInterrupt, with the signal's number, is raised where
    it ends by that.
    """
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(_interruptible(coroutine))
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
