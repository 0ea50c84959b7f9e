"""A reply as server-sent events: pieces of text as they settle, one event each, then why each text ended, then [DONE].

The status waits for the first piece, so what fails before it has a status of its own; what fails later is an event.
Who hangs up is worked for no longer, whether a stream or a whole reply was asked for.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Coroutine
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from tot.decoders.engine.sequence import Handle
from tot.decoders.remote.loop import together
from tot.decoders.request import Completion
from tot.decoders.serving.errors import understood
from tot.decoders.serving.prometheus import PrometheusMetrics
from tot.decoders.serving.replies import ServedReply
from tot.decoders.serving.service import Service
from tot.decoders.serving.wire import Asked

_TO_SEND = 10.0
"""Seconds beyond the time limit that a client has to read what was written for it."""


_T = TypeVar("_T")


async def while_connected(receive: Receive, work: Coroutine[Any, Any, _T]) -> _T:
    """Do the work, or cancel it when the client hangs up and raise ClientDisconnect. The body must have been read."""
    doing = asyncio.ensure_future(work)
    watching = asyncio.ensure_future(_hung_up(receive))
    try:
        await asyncio.wait({doing, watching}, return_when=asyncio.FIRST_COMPLETED)
        if not doing.done():
            raise ClientDisconnect
        return doing.result()
    finally:
        for task in (doing, watching):
            if not task.done():
                task.cancel()
                with suppress(asyncio.CancelledError, ClientDisconnect):
                    await task


async def _hung_up(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class StreamedReply(Response):
    """Decodes while it is sent; a client that hangs up, or reads too slowly, ends the decoding."""

    def __init__(self, asked: Asked, service: Service, metrics: PrometheusMetrics) -> None:
        self.background = None
        self._asked = asked
        self._service = service
        self._metrics = metrics
        self._reply = ServedReply(asked, service.engine.codec)
        self._begun = False
        self._one_by_one = asyncio.Lock()
        self._send: Send

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._send = send
        try:
            async with asyncio.timeout(self._service.limits.timeout + _TO_SEND):
                await while_connected(receive, self._all())
        except (ClientDisconnect, OSError):  # TimeoutError, too: who does not read would read of no error either
            self._metrics.hung_up()
            return
        except Exception as error:  # whatever it is, the client is told of it as an error  # noqa: BLE001
            told = understood(error)
            if not self._begun:
                await told.response()(scope, receive, send)
                return
            await self._tell(told.body())
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _tell(self, event: dict[str, Any] | str) -> None:
        """Send an event; the first begins the stream."""
        text = event if isinstance(event, str) else json.dumps(event, separators=(",", ":"))
        async with self._one_by_one:
            if not self._begun:
                self._begun = True
                headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-store")]
                await self._send({"type": "http.response.start", "status": 200, "headers": headers})
            await self._send({"type": "http.response.body", "body": f"data: {text}\n\n".encode(), "more_body": True})

    async def _all(self) -> None:
        asked, service = self._asked, self._service
        with self._metrics.timed() as text_came:
            async with service.admitted() as meter, service.submitted(asked, meter, stream=True) as handles:
                texts = [partial(self._one, at, handle, text_came) for at, handle in enumerate(handles)]
                done = await together(texts)
            self._metrics.spent(done)
        if asked.wanted.stream_options is not None and asked.wanted.stream_options.include_usage:
            await self._tell(self._reply.usage(done, meter.forwards))
        await self._tell("[DONE]")

    async def _one(self, at: int, handle: Handle, text_came: Callable[[], None]) -> list[Completion]:
        """The stream of one prompt's texts."""
        n = self._asked.requests[at].sampling.n
        opened: set[int] = set()

        async def tell(sample: int, text: str) -> None:
            index = at * n + sample
            if sample not in opened and self._asked.chat:
                await self._tell(self._reply.opening(index))
            opened.add(sample)
            if text:
                await self._tell(self._reply.piece(index, text))

        async for sample, text in handle:
            text_came()
            await tell(sample, text)
        completions = await handle
        self._service.check([completions])
        for sample, completion in enumerate(completions):
            if sample not in opened:  # a text without any text
                await tell(sample, "")
            await self._tell(self._reply.ending(at * n + sample, completion))
        return completions
