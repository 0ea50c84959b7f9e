"""Run a coroutine from synchronous code, in a script or inside a running event loop."""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, TypeVar

LOADING = "tot-load"
"""Name of the threads that load models. They can't be interrupted."""
_T = TypeVar("_T")


async def _interruptible(coroutine: Coroutine[Any, Any, _T]) -> _T:
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None
    received: list[int] = []
    handled: list[signal.Signals] = []

    def stop(number: int) -> None:
        if not received:  # cancel once, even if more signals follow
            task.cancel()
        received.append(number)

    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            take = number == signal.SIGINT or signal.getsignal(number) is signal.SIG_DFL
            if take and signal.getsignal(number) is not signal.SIG_IGN:
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
    """Run a coroutine to its end; if this thread has a running event loop, in a new thread.

    Ctrl-C, SIGTERM and SIGHUP cancel the coroutine once. If that ends it, KeyboardInterrupt with the signal's number is
    raised.
    """
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(_interruptible(coroutine))
    result, cancel = _in_own_loop(coroutine)
    try:
        return result.result()
    except KeyboardInterrupt:
        cancel()
        return result.result()


async def in_own_thread(coroutine: Coroutine[Any, Any, _T]) -> _T:
    """Run a coroutine in an event loop of its own, so that its computations don't delay this one.

    Cancelling this call cancels the coroutine and waits for its end.
    """
    result, cancel = _in_own_loop(coroutine)
    ended = asyncio.wrap_future(result)
    try:
        return await asyncio.shield(ended)
    except asyncio.CancelledError:
        cancel()
        return await ended


def _in_own_loop(coroutine: Coroutine[Any, Any, _T]) -> tuple[Future[_T], Callable[[], None]]:
    """Start a coroutine in a new event loop in a thread. Return its future and a function that cancels it."""
    loop = asyncio.new_event_loop()
    task = loop.create_task(coroutine)

    def work() -> _T:
        try:
            return loop.run_until_complete(task)
        finally:
            loop.close()

    def cancel() -> None:
        with suppress(RuntimeError):  # the loop has ended
            loop.call_soon_threadsafe(task.cancel)

    return in_daemon_thread(work, "tot-solve"), cancel


async def in_thread(work: Callable[[], _T], name: str) -> _T:
    """Run `work` in a daemon thread. Cancelling this call abandons the thread, and nothing waits for its end."""
    return await asyncio.wrap_future(in_daemon_thread(work, name))


def in_daemon_thread(work: Callable[[], _T], name: str) -> Future[_T]:
    """Run `work` in a daemon thread and return a future of its result or exception."""
    future: Future[_T] = Future()

    def run() -> None:
        if not future.set_running_or_notify_cancel():
            return
        try:
            future.set_result(work())
        except BaseException as error:  # raised in the waiting thread  # noqa: BLE001
            future.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return future
