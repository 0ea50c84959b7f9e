"""A reply as server-sent events: pieces of text as they settle, one event each, then why each text ended, then [DONE].

The status waits for the first piece, so what fails before it has a status of its own; what fails later is an event.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from tot.decoders.engine.job import Handle
from tot.decoders.request import Completion
from tot.decoders.serving.asked import Asked
from tot.decoders.serving.connection import HungUpError, while_connected
from tot.decoders.serving.errors import understood
from tot.decoders.serving.metrics import Metrics
from tot.decoders.serving.replies import Reply
from tot.decoders.serving.service import Service

_TO_SEND = 10.0
"""Seconds beyond the time limit that a client has to read what was written for it."""


class Events:
    """The stream itself: begun by the first event."""

    def __init__(self, send: Send) -> None:
        self.begun = False
        self._send = send
        self._one_by_one = asyncio.Lock()

    async def tell(self, event: dict[str, Any] | str) -> None:
        text = event if isinstance(event, str) else json.dumps(event, separators=(",", ":"))
        async with self._one_by_one:
            if not self.begun:
                self.begun = True
                headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-store")]
                await self._send({"type": "http.response.start", "status": 200, "headers": headers})
            await self._send({"type": "http.response.body", "body": f"data: {text}\n\n".encode(), "more_body": True})

    async def end(self) -> None:
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})


class StreamedReply(Response):
    """Decodes while it is sent; a client that hangs up, or reads too slowly, ends the decoding."""

    def __init__(self, asked: Asked, service: Service, metrics: Metrics) -> None:
        self.background = None
        self._asked = asked
        self._service = service
        self._metrics = metrics
        self._reply = Reply(asked, service.engine.codec)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        events = Events(send)
        try:
            async with asyncio.timeout(self._service.limits.timeout + _TO_SEND):
                await while_connected(receive, self._all(events))
        except (HungUpError, OSError):  # a TimeoutError among them: who does not read would read of no error either
            self._metrics.hung_up()
            return
        except Exception as error:  # whatever it is, the client is told of it as an error  # noqa: BLE001
            told = understood(error)
            if not events.begun:
                await told.response()(scope, receive, send)
                return
            await events.tell(told.body())
        await events.end()

    async def _all(self, events: Events) -> None:
        asked, service = self._asked, self._service
        with self._metrics.timed() as timed:
            async with service.admitted() as meter, service.submitted(asked, meter, stream=True) as handles:
                async with _first_error_alone(), asyncio.TaskGroup() as group:
                    tasks = [
                        group.create_task(self._one(at, handle, events, timed.first_token))
                        for at, handle in enumerate(handles)
                    ]
                done = [task.result() for task in tasks]
            self._metrics.spent(done)
        if asked.include_usage:
            await events.tell(self._reply.usage(done, meter.forwards))
        await events.tell("[DONE]")

    async def _one(self, at: int, handle: Handle, events: Events, first: Callable[[], None]) -> list[Completion]:
        """The stream of one prompt's texts."""
        n = self._asked.requests[at].sampling.n
        opened: set[int] = set()

        async def tell(sample: int, text: str) -> None:
            index = at * n + sample
            if sample not in opened and self._asked.chat:
                await events.tell(self._reply.opening(index))
            opened.add(sample)
            if text:
                await events.tell(self._reply.piece(index, text))

        async for sample, text in handle:
            first()
            await tell(sample, text)
        completions = await handle
        self._service.check([completions])
        for sample, completion in enumerate(completions):
            if sample not in opened:  # a text without any text
                await tell(sample, "")
            await events.tell(self._reply.ending(at * n + sample, completion))
        return completions


@asynccontextmanager
async def _first_error_alone() -> AsyncIterator[None]:
    """The first of a task group's errors in place of the group: one is all that a client is told."""
    try:
        yield
    except BaseExceptionGroup as group:
        error: BaseException = group
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        raise error from None
