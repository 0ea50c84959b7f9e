"""The application: routes, and what stands around them (metrics, guard, bodies). Everything is JSON, errors too."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any, TypeVar

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from pydantic import BaseModel, ValidationError
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tot.decoders.errors import TotError
from tot.decoders.serving.asked import asked
from tot.decoders.serving.body import Bodies
from tot.decoders.serving.connection import HungUpError, while_connected
from tot.decoders.serving.errors import ServingError, reply
from tot.decoders.serving.guard import Guard
from tot.decoders.serving.metrics import Metrics
from tot.decoders.serving.replies import Reply
from tot.decoders.serving.service import Service
from tot.decoders.serving.streaming import StreamedReply
from tot.decoders.serving.wire import ChatWanted, TextWanted
from tot.machine import describe

_W = TypeVar("_W", bound=BaseModel)
_CLIENT_CLOSED_REQUEST = 499


def make_app(service: Service, key: str | None = None, hosts: Iterable[str] | None = ()) -> ASGIApp:
    """The ASGI application over a service; `key` and `hosts` as for `Guard`."""
    metrics = Metrics(service)
    api = FastAPI(openapi_url=None)  # the API is OpenAI's; what is added to it, `wire.py` says
    for kind in (HTTPException, ServingError, TotError, ValidationError, Exception):
        api.add_exception_handler(kind, reply)
    started = int(time.time())
    loaded = service.engine.loaded
    machine = describe(loaded.device, loaded.dtype)

    @api.get("/health")
    async def health() -> Response:
        stopping, failed = service.gate.closed, service.failed
        status = "stopping" if stopping else "ok" if failed is None else failed
        said = {"status": status, "model": service.name, "decoder": service.default, "machine": machine}
        return JSONResponse(said, 503 if stopping or failed is not None else 200)

    @api.get("/metrics")
    async def read_metrics() -> Response:
        return Response(metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    @api.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [_model(name, started) for name in service.models]}

    @api.get("/v1/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        service.method(name)
        return _model(name, started)

    @api.post("/v1/chat/completions")
    async def chat(request: Request) -> Response:
        return await answer(request, await _read(request, ChatWanted))

    @api.post("/v1/completions")
    async def text(request: Request) -> Response:
        return await answer(request, await _read(request, TextWanted))

    async def answer(request: Request, wanted: ChatWanted | TextWanted) -> Response:
        work = asked(wanted, service.method(wanted.model, wanted.decoder), service.limits)
        if wanted.stream:
            if work.echo:
                raise ServingError(400, "echo is for whole replies: leave it or stream out", "echo")
            return StreamedReply(work, service, metrics)
        try:
            with metrics.timed():
                outcome = await while_connected(request.receive, service.complete(work))
        except HungUpError:
            metrics.hung_up()
            return Response(status_code=_CLIENT_CLOSED_REQUEST)
        metrics.spent(outcome.completions)
        return JSONResponse(Reply(work, service.engine.codec).whole(outcome))

    return Counted(Guard(Bodies(api, service.limits), key, hosts), metrics)


class Counted:
    """Counts replies by route and status."""

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def counted(message: Message) -> None:
            if message["type"] == "http.response.start":
                self._metrics.replied(scope["path"], message["status"])
            await send(message)

        await self._app(scope, receive, counted)


async def _read(request: Request, kind: type[_W]) -> _W:
    return kind.model_validate_json(await request.body())


def _model(name: str, started: int) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": started, "owned_by": "tot"}
