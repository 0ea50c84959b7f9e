"""How a reply is delivered: the work of a request runs, and its events are the reply.

A whole reply is one event. A stream is server-sent events and ends with [DONE]. An error before the first event sets
the status, a later one is an event. The work is cancelled when its client disconnects or does not read.
"""

from __future__ import annotations

import asyncio
import json
import time

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from tot.decoders.serving.errors import as_serving_error
from tot.decoders.serving.gate import closing
from tot.decoders.serving.service import Event, Service, Work

_SEND_SECONDS = 10.0
"""Seconds beyond the time limit that a client has to read the stream."""
_HEADERS = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-store")]


class Reply(Response):
    """Runs the work and sends its events. Raises its error if there is no event before."""

    def __init__(self, work: Work, service: Service) -> None:
        self.background = None
        self._work = work
        self._service = service
        self._started = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        work, service = self._work, self._service
        events: asyncio.Queue[Event | None] = asyncio.Queue()
        loop = asyncio.get_running_loop()

        def emit(event: Event) -> None:
            loop.call_soon_threadsafe(events.put_nowait, event)

        def end(running: asyncio.Task[None]) -> None:
            events.put_nowait(None)
            service.running.discard(running)
            if not running.cancelled():
                running.exception()  # so that it is retrieved if the client has left

        began = time.perf_counter()
        running = asyncio.create_task(work.run(emit, service.metrics))
        service.running.add(running)
        running.add_done_callback(end)
        leaving = asyncio.create_task(_disconnected(receive))
        leaving.add_done_callback(lambda _: running.cancel())
        whole: Event = ""
        try:
            async with asyncio.timeout(service.limits.timeout + _SEND_SECONDS if work.stream else None) as limit:
                while (event := await events.get()) is not None:
                    whole = event
                    if work.stream and not self._started:
                        service.metrics.first_text_seconds.observe(time.perf_counter() - began)
                    if work.stream:
                        await self._send_event(send, event)
            if leaving.done():
                service.metrics.hung_up()
                return
            if running.cancelled():
                raise closing()
            running.result()
            service.metrics.request_seconds.observe(time.perf_counter() - began)
        except Exception as error:
            if limit.expired():  # a client that does not read gets no error
                service.metrics.hung_up()
                return
            if not self._started:
                raise
            await self._send_event(send, work.failed(as_serving_error(error)))
        finally:
            leaving.cancel()
            running.cancel()
        if work.stream:
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        else:
            await Response(_json(whole), media_type="application/json")(scope, receive, send)

    async def _send_event(self, send: Send, event: Event) -> None:
        """Send an event, after the status and the headers if it is the first."""
        if not self._started:
            self._started = True
            await send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
        text = event if isinstance(event, str) else _json(event)
        kind = f"event: {event['type']}\n" if isinstance(event, dict) and "type" in event else ""
        await send({"type": "http.response.body", "body": f"{kind}data: {text}\n\n".encode(), "more_body": True})


def _json(event: Event) -> str:
    return json.dumps(event, separators=(",", ":"))


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
