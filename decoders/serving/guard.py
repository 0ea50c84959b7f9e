"""Access control: allowed hosts and origins, the API key, and the size and type of request bodies.

Every page in a browser can reach a server on loopback: by its address (`Origin`), or by a domain that resolves to
127.0.0.1 (`Host`, DNS rebinding). Both are rejected. The API key is compared in constant time. Below /live/, a token in
the path takes its place.
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

_MAX_DISCARDED = 64 * 2**20
"""Bytes beyond the limit on bodies that are read and discarded."""


class Guard:
    """ASGI middleware that runs before all routes. `hosts` are the allowed hosts besides loopback; None allows all."""

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
        # HTTP/1.0 does not require a Host header. Browsers always send one, so this does not admit web pages.
        named = "host" in headers or scope.get("http_version") != "1.0"
        if named and not self._known(_host_of(f"//{headers.get('host', '')}")):
            return ServingError(
                403, "the Host header names another machine: use this server's address, or start with --allowed-host"
            )
        origin = headers.get("origin")
        if origin is not None and not (_host_of(origin) and self._known(_host_of(origin), always=True)):
            return ServingError(403, "requests from other origins are rejected: start the server with --allowed-host")
        if self._authorization is None or scope["path"] == "/health" or scope["path"].startswith("/live/"):
            return None
        given = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
        if not hmac.compare_digest(given, self._authorization):
            return ServingError(
                401,
                "an API key is required (Authorization: Bearer ...), and this one is invalid"
                if given
                else "an API key is required",
                code="invalid_api_key",
            )
        return None

    def _known(self, host: str, always: bool = False) -> bool:
        if self._hosts is None and not always:
            return True
        return is_loopback(host) or host in (self._hosts or ())


def _host_of(address: str) -> str:
    """Return a URL's host in lower case; empty if the host is missing or invalid."""
    try:
        return urlsplit(address).hostname or ""
    except ValueError:
        return ""


def client_of(request: Request) -> str:
    """Return who sends a request: its address and API key, which many clients may share."""
    return f"{request.client.host if request.client else ''} {request.headers.get('authorization', '')}"


async def body_of(request: Request, limits: Limits) -> bytes:
    """Read a request's body: JSON, of limited size, within a time limit.

    A body that is too large is read and discarded up to `_MAX_DISCARDED`, so that the client receives the error.

    Raises ServingError, or ClientDisconnect if the client disconnects.
    """
    limit, headers = limits.max_body, request.headers
    too_large = ServingError(413, f"the body is larger than this server's limit of {limit} bytes", code="too_large")
    content_length = headers.get("content-length", "0")
    if content_length.isdecimal() and int(content_length[:20]) > limit + _MAX_DISCARDED:
        raise too_large
    body, size = bytearray(), 0
    try:
        async with asyncio.timeout(limits.body_timeout):
            async for chunk in request.stream():
                size += len(chunk)
                if size <= limit:
                    body += chunk
                elif size > limit + _MAX_DISCARDED:
                    break
    except TimeoutError:
        message = f"the body did not arrive within {limits.body_timeout:g} seconds"
        raise ServingError(408, message, code="body_timeout") from None
    if size > limit:
        raise too_large
    kind = headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise ServingError(415, f"the body is of type {kind!r}: send application/json", code="unsupported_type")
    if headers.get("content-encoding", "identity").lower() != "identity":
        raise ServingError(415, "the body is compressed: send it uncompressed", code="unsupported_encoding")
    return bytes(body)
