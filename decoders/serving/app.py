"""The ASGI application: routes, access control, and the body of a request. All replies are JSON, including errors.

Every page in a browser can reach a server on loopback: by its address (`Origin`), or by a domain that resolves to
127.0.0.1 (`Host`, DNS rebinding). Both are rejected. The API key is compared in constant time. Below /live/, a token in
the path takes its place.
"""

from __future__ import annotations

import asyncio
import hmac
import time
from collections.abc import Collection
from typing import Any
from urllib.parse import urlsplit

from fastapi import APIRouter, Depends, FastAPI, Request
from fastapi.responses import JSONResponse, Response
from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from tot.decoders.errors import TotError
from tot.decoders.remote.network import is_loopback
from tot.decoders.serving.delivery import Delivery
from tot.decoders.serving.errors import ServingError, reply
from tot.decoders.serving.limits import Limits
from tot.decoders.serving.messages import MessagesReply
from tot.decoders.serving.messages_body import CountBody, MessagesBody
from tot.decoders.serving.protocol import ChatBody, TextBody
from tot.decoders.serving.replies import ChatReply, TextReply
from tot.decoders.serving.responses import ResponsesReply
from tot.decoders.serving.responses_body import ResponsesBody
from tot.decoders.serving.service import AnyBody, Service

_CLIENT_CLOSED_REQUEST = 499
_ROUTES: dict[str, tuple[type[AnyBody], Any]] = {
    "/v1/chat/completions": (ChatBody, ChatReply),
    "/v1/completions": (TextBody, TextReply),
    "/v1/responses": (ResponsesBody, ResponsesReply),
    "/v1/messages": (MessagesBody, MessagesReply),
    "/v1/messages/count_tokens": (CountBody, None),
}


def make_app(
    service: Service, key: str | None = None, hosts: Collection[str] | None = (), pages: APIRouter | None = None
) -> FastAPI:
    """Build the application of a service.

    Args:
        service: The models.
        key: The API key that requests need.
        hosts: Allowed hosts besides loopback; None allows all.
        pages: Routes below /live/, each with a token of its own.
    """
    api = guarded(key, hosts)
    head = {"object": "model", "created": int(time.time()), "owned_by": "tot"}

    @api.get("/health")
    async def health() -> Response:
        status = service.status
        return JSONResponse({"status": status, **service.about}, 200 if status == "ok" else 503)

    @api.get("/metrics")
    async def metrics() -> Response:
        return Response(service.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    @api.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [await model(name) for name in service.models]}

    @api.get("/v1/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        return {"id": name, **head, **service.source(name).models[name]}

    async def answer(request: Request) -> Response:
        body_type, reply_type = _ROUTES[request.url.path]
        try:
            body = body_type.model_validate_json(await _body_of(request, service.limits))
        except ClientDisconnect:
            service.metrics.disconnects.inc()
            return Response(status_code=_CLIENT_CLOSED_REQUEST)
        source = service.source(body.model)
        work = source.work(body)
        if reply_type is None:
            return JSONResponse({"input_tokens": await asyncio.to_thread(work.count)})
        client = f"{request.client.host if request.client else ''} {_key_of(request)}"
        return Delivery(service, source.gate, client, work, reply_type(body, work.about), body.stream)

    for path in _ROUTES:
        api.post(path)(answer)
    if pages is not None:
        api.include_router(pages)
    return api


def guarded(key: str | None = None, hosts: Collection[str] | None = ()) -> FastAPI:
    """Return an application without routes that checks hosts, origins and the API key of requests."""
    authorization = None if key is None else f"Bearer {key}".encode()
    allowed = None if hosts is None else frozenset(host.lower() for host in hosts)

    def allows(host: str) -> bool:
        return is_loopback(host) or host in (allowed or ())

    async def check(request: Request) -> None:
        headers, path = request.headers, request.url.path
        # HTTP/1.0 does not require a Host header. Browsers always send one, so this does not admit web pages.
        named = "host" in headers or request.scope["http_version"] != "1.0"
        if allowed is not None and named and not allows(_host_of(f"//{headers.get('host', '')}")):
            message = "the Host header names another machine: use this server's address, or start with --allowed-host"
            raise ServingError(403, message)
        if "origin" in headers and not allows(_host_of(headers["origin"])):
            raise ServingError(403, "requests from other origins are rejected: start the server with --allowed-host")
        if authorization is None or path == "/health" or path.startswith("/live/"):
            return
        given = _key_of(request)
        if not hmac.compare_digest(given.encode("latin-1"), authorization):
            which = " (Authorization: Bearer ...), and this one is invalid" if given else ""
            raise ServingError(401, f"an API key is required{which}", code="invalid_api_key")

    api = FastAPI(openapi_url=None, dependencies=[Depends(check)])
    for kind in (HTTPException, ServingError, TotError, ValidationError, Exception):
        api.add_exception_handler(kind, reply)
    return api


def _key_of(request: Request) -> str:
    """Return the API key of a request as an Authorization header; Anthropic's clients send `x-api-key`."""
    key = request.headers.get("x-api-key")
    return request.headers.get("authorization", "" if key is None else f"Bearer {key}")


def _host_of(address: str) -> str:
    """Return a URL's host in lower case; empty if the host is missing or invalid."""
    try:
        return urlsplit(address).hostname or ""
    except ValueError:
        return ""


async def _body_of(request: Request, limits: Limits) -> bytes:
    """Read a request's body: JSON, of limited size, within a time limit.

    Raises ServingError, or ClientDisconnect if the client disconnects.
    """
    length, body = request.headers.get("content-length", "0"), bytearray()
    too_large = ServingError(
        413, f"the body is larger than this server's limit of {limits.max_body} bytes", code="too_large"
    )
    if length.isdecimal() and int(length[:20]) > limits.max_body:
        raise too_large
    try:
        async with asyncio.timeout(limits.body_timeout):
            async for chunk in request.stream():
                body += chunk
                if len(body) > limits.max_body:  # uvicorn discards the rest, so that the client receives the error
                    raise too_large
    except TimeoutError:
        message = f"the body did not arrive within {limits.body_timeout:g} seconds"
        raise ServingError(408, message, code="body_timeout") from None
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise ServingError(415, f"the body is of type {kind!r}: send application/json", code="unsupported_type")
    if request.headers.get("content-encoding", "identity").lower() != "identity":
        raise ServingError(415, "the body is compressed: send it uncompressed", code="unsupported_encoding")
    return bytes(body)
