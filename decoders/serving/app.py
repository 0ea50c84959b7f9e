"""The ASGI application: routes, metrics and access control. All replies are JSON, including errors."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

from fastapi import APIRouter, FastAPI, Request
from fastapi.responses import JSONResponse, Response
from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tot.decoders.errors import TotError
from tot.decoders.serving.errors import ServingError, reply
from tot.decoders.serving.guard import Guard, body_of, client_of
from tot.decoders.serving.prometheus import PrometheusMetrics
from tot.decoders.serving.replies import ServedReply
from tot.decoders.serving.service import Service
from tot.decoders.serving.streaming import EventStream, StreamedReply, while_connected
from tot.decoders.serving.wire import ChatWanted, Named, TextWanted, asked

_CLIENT_CLOSED_REQUEST = 499


def make_app(
    service: Service,
    key: str | None = None,
    hosts: Iterable[str] | None = (),
    machine: str | None = None,
    pages: APIRouter | None = None,
) -> ASGIApp:
    """Build the ASGI application for a service: `key` and `hosts` are for `Guard`, /health reports `machine`.

    `pages` has routes below /live/, each with a token of its own.
    """
    metrics = PrometheusMetrics(service)
    api = FastAPI(openapi_url=None)  # the API is OpenAI's; `wire.py` documents the additional fields
    for kind in (HTTPException, ServingError, TotError, ValidationError, Exception):
        api.add_exception_handler(kind, reply)
    started = int(time.time())

    @api.get("/health")
    async def health() -> Response:
        stopping, failed = service.gate.closed, service.failed
        status = "stopping" if stopping else "ok" if failed is None else failed
        body = {"status": status, "model": service.name, "decoder": service.default, "machine": machine}
        return JSONResponse(body, 503 if stopping or failed is not None else 200)

    @api.get("/metrics")
    async def read_metrics() -> Response:
        return Response(metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    def one(name: str) -> dict[str, Any]:
        about = {"tot": {"decoder": service.method(name)}} if service.decodes(name) else {}
        return {"id": name, "object": "model", "created": started, "owned_by": "tot", **about}

    @api.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [one(name) for name in service.listed]}

    @api.get("/v1/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        return one(name)

    @api.post("/v1/chat/completions")
    async def chat(request: Request) -> Response:
        return await answer(request, ChatWanted)

    @api.post("/v1/completions")
    async def text(request: Request) -> Response:
        return await answer(request, TextWanted)

    @api.post("/v1/responses")
    async def responses(request: Request) -> Response:
        return await answer(request, None)

    if pages is not None:
        api.include_router(pages)

    async def answer(request: Request, kind: type[ChatWanted | TextWanted] | None) -> Response:
        """Answer by a decoder, or by a search if the model is one; None is a kind that only searches answer."""
        try:
            body = await body_of(request, service.limits)
            if kind is None or (kind is ChatWanted and not service.decodes(Named.model_validate_json(body).model)):
                if service.searches is None:
                    raise HTTPException(404)
                return await service.searches.reply(request, body, metrics)
            wanted = kind.model_validate_json(body)
            work = asked(wanted, service.method(wanted.model), service.limits, client_of(request), service.sampling)
            if wanted.stream:
                return EventStream(StreamedReply(work, service, metrics).write, service.limits, metrics)
            with metrics.timed():
                outcome = await while_connected(request.receive, service.complete(work))
        except ClientDisconnect:
            metrics.hung_up()
            return Response(status_code=_CLIENT_CLOSED_REQUEST)
        metrics.spent(completion.usage for completions in outcome.completions for completion in completions)
        return JSONResponse(ServedReply(work, service.engine.codec).whole(outcome))

    return _counted(Guard(api, key, hosts), metrics)


def _counted(app: ASGIApp, metrics: PrometheusMetrics) -> ASGIApp:
    """Counts replies by route and status."""

    async def run(scope: Scope, receive: Receive, send: Send) -> None:
        async def counted(message: Message) -> None:
            if message["type"] == "http.response.start":
                metrics.replied(scope["path"], message["status"])
            await send(message)

        await app(scope, receive, counted)

    return run
