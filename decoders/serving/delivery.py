"""How a reply is delivered: whole, or as a stream of server-sent events.

An error before the first event sets the status, a later one is an event. The work is cancelled when its client
disconnects or does not read.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from tot.decoders.serving.errors import as_serving_error
from tot.decoders.serving.gate import Gate, closing
from tot.decoders.serving.replies import ChatReply, Event
from tot.decoders.serving.service import Choice, Piece, Result, Service, Work

_SEND_SECONDS = 10.0
"""Seconds beyond the time limit that a client has to read the stream."""
_HEADERS = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-store")]


class Delivery(Response):
    """Runs the work when the gate admits it, and sends its reply. Raises its error if nothing was sent before."""

    def __init__(self, service: Service, gate: Gate, client: str, work: Work, reply: ChatReply, stream: bool) -> None:
        self.background = None
        self._service, self._gate, self._client = service, gate, client
        self._work, self._reply, self._stream = work, reply, stream
        self._started = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        service, reply, stream, loop = self._service, self._reply, self._stream, asyncio.get_running_loop()
        events: asyncio.Queue[Piece | Choice | None] = asyncio.Queue()

        async def work() -> Result:
            async with self._gate.passed(self._client) as seconds:
                return await self._work.run(lambda one: loop.call_soon_threadsafe(events.put_nowait, one), seconds)

        def end(running: asyncio.Task[Result]) -> None:
            events.put_nowait(None)
            service.running.discard(running)
            if not running.cancelled():
                running.exception()  # so that it is retrieved if the client has left

        running = asyncio.create_task(work())
        service.running.add(running)
        running.add_done_callback(end)
        leaving = asyncio.create_task(_disconnected(receive))
        leaving.add_done_callback(lambda _: running.cancel())
        try:
            async with asyncio.timeout(service.limits.timeout + _SEND_SECONDS if stream else None) as limit:
                while (event := await events.get()) is not None:
                    if stream:
                        await self._send(send, reply.piece(event) if isinstance(event, Piece) else reply.ending(event))
                if leaving.done():
                    service.metrics.disconnects.inc()
                    return
                if running.cancelled():
                    raise closing()
                result = running.result()
                service.metrics.spent(result.usage)
                if stream:
                    await self._send(send, reply.last(result))
        except Exception as error:
            if limit.expired():  # a client that does not read gets no error
                service.metrics.disconnects.inc()
                return
            if not self._started:
                raise
            await self._send(send, [reply.failed(as_serving_error(error))])
        finally:
            leaving.cancel()
            running.cancel()
        if stream:
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        else:
            await Response(_json(reply.whole(result)), media_type="application/json")(scope, receive, send)

    async def _send(self, send: Send, events: Iterable[Event]) -> None:
        """Send events, after the status and the headers if they are the first."""
        if not self._started:
            self._started = True
            await send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
        for event in events:
            text = event if isinstance(event, str) else _json(event)
            kind = f"event: {event['type']}\n" if isinstance(event, dict) and "type" in event else ""
            await send({"type": "http.response.body", "body": f"{kind}data: {text}\n\n".encode(), "more_body": True})


def _json(event: Any) -> str:
    return json.dumps(event, separators=(",", ":"))


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
