"""Who may ask at all: the hosts a request may name, pages of other sites kept out, the key; and what a body may be:
JSON of limited size.

A server on loopback is within reach of every page in a browser on that machine: by its address (`Origin`), or by a
name that the page's owner has pointed at 127.0.0.1 (`Host`). Both are refused. The key is compared in constant time.
"""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import Iterable
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from tot.decoders.remote.network import is_loopback
from tot.decoders.serving.errors import ServingError
from tot.decoders.serving.options import Limits

_DROPPED = 64 * 2**20
"""Bytes beyond the limit on bodies that are read on."""


class Guard:
    """Before all else. `hosts` are names that requests may be for besides loopback's; None lets all through."""

    def __init__(self, app: ASGIApp, key: str | None = None, hosts: Iterable[str] | None = ()) -> None:
        self._app = app
        self._authorization = None if key is None else f"Bearer {key}".encode()
        self._hosts = None if hosts is None else frozenset(host.lower() for host in hosts)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            refusal = self._refusal(Headers(scope=scope), scope)
            if refusal is not None:
                await refusal.response()(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _refusal(self, headers: Headers, scope: Scope) -> ServingError | None:
        # HTTP/1.0 needs no Host header, and no browser leaves it out: a page can't reach this server so.
        named = "host" in headers or scope.get("http_version") != "1.0"
        if named and not self._known(_host_of(f"//{headers.get('host', '')}")):
            return ServingError(
                403, "the Host header names another machine: use this one's address, or start with --allowed-host"
            )
        origin = headers.get("origin")
        if origin is not None and not (_host_of(origin) and self._known(_host_of(origin), always=True)):
            return ServingError(403, "pages of other sites may not use this server: start it with --allowed-host")
        if self._authorization is None or scope["path"] == "/health":
            return None
        given = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
        if not hmac.compare_digest(given, self._authorization):
            return ServingError(
                401,
                "a key is needed (Authorization: Bearer ...), and this is not it" if given else "a key is needed",
                code="invalid_api_key",
            )
        return None

    def _known(self, host: str, always: bool = False) -> bool:
        if self._hosts is None and not always:
            return True
        return is_loopback(host) or host in (self._hosts or ())


def _host_of(address: str) -> str:
    """A URL's host in lower case; nothing where there is none to be read."""
    try:
        return urlsplit(address).hostname or ""
    except ValueError:
        return ""


async def body_of(request: Request, limits: Limits) -> bytes:
    """A request's body: JSON only, of limited size, in limited time. One that is too large is read on and dropped for a
    while, so that its sender gets to see the refusal.

    Raises ServingError, or ClientDisconnect where the client hung up.
    """
    most, headers = limits.max_body, request.headers
    too_large = ServingError(
        413, f"the body is larger than {most} bytes, which is this server's limit", code="too_large"
    )
    announced = headers.get("content-length", "0")
    if announced.isdecimal() and int(announced[:20]) > most + _DROPPED:
        raise too_large
    body, size = bytearray(), 0
    try:
        async with asyncio.timeout(limits.body_timeout):
            async for chunk in request.stream():
                size += len(chunk)
                if size <= most:
                    body += chunk
                elif size > most + _DROPPED:
                    break
    except TimeoutError:
        said = f"the body was not here within {limits.body_timeout:g} seconds"
        raise ServingError(408, said, code="body_timeout") from None
    if size > most:
        raise too_large
    kind = headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise ServingError(415, f"the body is of type {kind!r}: send application/json", code="unsupported_type")
    if headers.get("content-encoding", "identity").lower() != "identity":
        raise ServingError(415, "the body is compressed: send it as it is", code="unsupported_encoding")
    return bytes(body)
