"""Bodies: JSON only, of limited size, in limited time; read whole before anything is done with them. Pure ASGI.

A body that is too large is read on and dropped for a while, so that its sender gets to see the refusal.
"""

from __future__ import annotations

import asyncio

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tot.decoders.serving.errors import ServingError
from tot.decoders.serving.limits import Limits

_DROPPED = 64 * 2**20
"""Bytes beyond the limit that are read on."""


class Bodies:
    def __init__(self, app: ASGIApp, limits: Limits) -> None:
        self._app = app
        self._limits = limits

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        try:
            async with asyncio.timeout(self._limits.body_timeout):
                body = await self._read(Headers(scope=scope), receive)
        except TimeoutError:
            error = ServingError(
                408, f"the body was not here within {self._limits.body_timeout:g} seconds", code="body_timeout"
            )
            await error.response()(scope, receive, send)
            return
        except ServingError as error:
            await error.response()(scope, receive, send)
            return
        if body is None:
            return
        read: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

        async def again() -> Message:
            return read.pop() if read else await receive()

        await self._app(scope, again, send)

    async def _read(self, headers: Headers, receive: Receive) -> bytes | None:
        """The body; None where the client hung up."""
        most = self._limits.max_body
        announced = headers.get("content-length", "0")
        if announced.isdecimal() and int(announced[:20]) > most + _DROPPED:
            raise _too_large(most)
        body, size = bytearray(), 0
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                return None
            chunk = message.get("body", b"")
            size += len(chunk)
            if size <= most:
                body += chunk
            if not message.get("more_body", False) or size > most + _DROPPED:
                break
        if size > most:
            raise _too_large(most)
        kind = headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json":
            raise ServingError(415, f"the body is of type {kind!r}: send application/json", code="unsupported_type")
        if headers.get("content-encoding", "identity").lower() != "identity":
            raise ServingError(415, "the body is compressed: send it as it is", code="unsupported_encoding")
        return bytes(body)


def _too_large(most: int) -> ServingError:
    return ServingError(413, f"the body is larger than {most} bytes, which is this server's limit", code="too_large")
