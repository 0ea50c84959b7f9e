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
from tot.decoders.serving.limits import Limits


class AccessControl:
    """ASGI middleware that runs before all routes. `hosts` are the allowed hosts besides loopback; None allows all."""

    def __init__(self, app: ASGIApp, key: str | None = None, hosts: Iterable[str] | None = ()) -> None:
        self._app = app
        self._authorization = None if key is None else f"Bearer {key}".encode()
        self._hosts = None if hosts is None else frozenset(host.lower() for host in hosts)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        refusal = self._refusal(Headers(scope=scope), scope) if scope["type"] == "http" else None
        await (self._app if refusal is None else refusal.response())(scope, receive, send)

    def _refusal(self, headers: Headers, scope: Scope) -> ServingError | None:
        # HTTP/1.0 does not require a Host header. Browsers always send one, so this does not admit web pages.
        host = _host_of(f"//{headers.get('host', '')}") if "host" in headers or scope["http_version"] != "1.0" else None
        if host is not None and self._hosts is not None and not self._allows(host):
            return ServingError(
                403, "the Host header names another machine: use this server's address, or start with --allowed-host"
            )
        if "origin" in headers and not self._allows(_host_of(headers["origin"])):
            return ServingError(403, "requests from other origins are rejected: start the server with --allowed-host")
        if self._authorization is None or scope["path"] == "/health" or scope["path"].startswith("/live/"):
            return None
        given = headers.get("authorization", "")
        if hmac.compare_digest(given.encode("latin-1"), self._authorization):
            return None
        which = " (Authorization: Bearer ...), and this one is invalid" if given else ""
        return ServingError(401, f"an API key is required{which}", code="invalid_api_key")

    def _allows(self, host: str) -> bool:
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

    Raises ServingError, or ClientDisconnect if the client disconnects.
    """
    length, body = request.headers.get("content-length", "0"), bytearray()
    if length.isdecimal() and int(length[:20]) > limits.max_body:
        raise _too_large(limits)
    try:
        async with asyncio.timeout(limits.body_timeout):
            async for chunk in request.stream():
                body += chunk
                if len(body) > limits.max_body:  # uvicorn discards the rest, so that the client receives the error
                    raise _too_large(limits)
    except TimeoutError:
        message = f"the body did not arrive within {limits.body_timeout:g} seconds"
        raise ServingError(408, message, code="body_timeout") from None
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise ServingError(415, f"the body is of type {kind!r}: send application/json", code="unsupported_type")
    if request.headers.get("content-encoding", "identity").lower() != "identity":
        raise ServingError(415, "the body is compressed: send it uncompressed", code="unsupported_encoding")
    return bytes(body)


def _too_large(limits: Limits) -> ServingError:
    message = f"the body is larger than this server's limit of {limits.max_body} bytes"
    return ServingError(413, message, code="too_large")
