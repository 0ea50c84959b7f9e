"""Stream replies as server-sent events: pieces of text, then the finish reason of each choice, then [DONE].

The status is sent with the first piece. An earlier error sets the status, a later error is an event. A request is
cancelled when its client disconnects, for streams and for complete replies.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from tot.decoders.engine.sequence import Handle, ThinkingPiece
from tot.decoders.remote.loop import together
from tot.decoders.request import Completion
from tot.decoders.serving.errors import ServingError, understood
from tot.decoders.serving.options import Limits
from tot.decoders.serving.prometheus import PrometheusMetrics
from tot.decoders.serving.replies import ServedReply
from tot.decoders.serving.service import Service
from tot.decoders.serving.wire import Asked

_SEND_SECONDS = 10.0
"""Seconds beyond the time limit that a client has to read the stream."""


_T = TypeVar("_T")


async def while_connected(receive: Receive, work: Coroutine[Any, Any, _T]) -> _T:
    """Run the work, or cancel it and raise ClientDisconnect if the client disconnects. Read the body before."""
    working = asyncio.ensure_future(work)
    watching = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait({working, watching}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientDisconnect
        return working.result()
    finally:
        for task in (working, watching):
            if not task.done():
                task.cancel()
                with suppress(asyncio.CancelledError, ClientDisconnect):
                    await task


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


Event = dict[str, Any] | str
"""JSON, whose `type` is the name of the event, or text."""
SendEvent = Callable[[Event], Awaitable[None]]


class EventStream(Response):
    """Sends the events of `write`, which is cancelled if the client disconnects or reads too slowly."""

    def __init__(
        self,
        write: Callable[[SendEvent], Coroutine[Any, Any, None]],
        limits: Limits,
        metrics: PrometheusMetrics,
        failed: Callable[[ServingError], dict[str, Any]] = ServingError.body,
    ) -> None:
        """`failed` returns the event of an error after the first event."""
        self.background = None
        self._write = write
        self._seconds = limits.timeout + _SEND_SECONDS
        self._metrics = metrics
        self._failed = failed
        self._started = False
        self._send_lock = asyncio.Lock()
        self._send: Send

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._send = send
        try:
            async with asyncio.timeout(self._seconds):
                await while_connected(receive, self._write(self._send_event))
        except (ClientDisconnect, OSError):  # includes TimeoutError: a client that does not read gets no error
            self._metrics.hung_up()
            return
        except Exception as error:  # the client gets an error for every exception  # noqa: BLE001
            problem = understood(error)
            if not self._started:
                await problem.response()(scope, receive, send)
                return
            await self._send_event(self._failed(problem))
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _send_event(self, event: Event) -> None:
        """Send an event, after the status and the headers if it is the first."""
        text = event if isinstance(event, str) else json.dumps(event, separators=(",", ":"))
        kind = "" if isinstance(event, str) or "type" not in event else f"event: {event['type']}\n"
        async with self._send_lock:
            if not self._started:
                self._started = True
                headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-store")]
                await self._send({"type": "http.response.start", "status": 200, "headers": headers})
            body = f"{kind}data: {text}\n\n".encode()
            await self._send({"type": "http.response.body", "body": body, "more_body": True})


class StreamedReply:
    """Decodes a request and sends the pieces of its texts."""

    def __init__(self, asked: Asked, service: Service, metrics: PrometheusMetrics) -> None:
        self._asked = asked
        self._service = service
        self._metrics = metrics
        self._reply = ServedReply(asked, service.engine.codec)

    async def write(self, send: SendEvent) -> None:
        asked, service = self._asked, self._service
        with self._metrics.timed() as on_text:
            async with service.admitted(asked) as meter, service.submitted(asked, meter, stream=True) as handles:
                streams = [partial(self._one, send, i, handle, on_text) for i, handle in enumerate(handles)]
                completions = await together(streams)
            self._metrics.spent([sample.usage for samples in completions for sample in samples])
        if asked.wanted.stream_options is not None and asked.wanted.stream_options.include_usage:
            await send(self._reply.usage(completions, meter.forwards))
        await send("[DONE]")

    async def _one(self, send: SendEvent, i: int, handle: Handle, on_text: Callable[[], None]) -> list[Completion]:
        """Stream the samples of prompt `i` and return its completions."""
        n = self._asked.requests[i].sampling.n
        opened: set[int] = set()

        async def send_text(sample: int, text: str) -> None:
            index = i * n + sample
            if sample not in opened and self._asked.chat:
                await send(self._reply.opening(index))
            opened.add(sample)
            if text:
                await send(self._reply.piece(index, text))

        async for sample, text in handle:
            on_text()
            if self._asked.chat or not isinstance(text, ThinkingPiece):
                await send_text(sample, text)
        completions = await handle
        self._service.check([completions])
        for sample, completion in enumerate(completions):
            if sample not in opened:  # an empty completion
                await send_text(sample, "")
            await send(self._reply.ending(i * n + sample, completion))
        return completions
