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
from starlette.types import ASGIApp

from tot.decoders.errors import TotError
from tot.decoders.serving.access import AccessControl, body_of, client_of
from tot.decoders.serving.delivery import Reply
from tot.decoders.serving.errors import ServingError, reply
from tot.decoders.serving.protocol import ModelName
from tot.decoders.serving.service import Service

_CLIENT_CLOSED_REQUEST = 499
_ROUTES = ("/v1/chat/completions", "/v1/completions", "/v1/responses")


def make_app(
    service: Service, key: str | None = None, hosts: Iterable[str] | None = (), pages: APIRouter | None = None
) -> ASGIApp:
    """Build the ASGI application of a service: `key` and `hosts` are for `AccessControl`.

    `pages` has routes below /live/, each with a token of its own.
    """
    api = FastAPI(openapi_url=None)  # the API is OpenAI's; `protocol.py` documents the additional fields
    for kind in (HTTPException, ServingError, TotError, ValidationError, Exception):
        api.add_exception_handler(kind, reply)
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
        service.check(name)
        return {"id": name, **head, **service.models[name]}

    async def answer(request: Request) -> Response:
        try:
            body = await body_of(request, service.limits)
            name = ModelName.model_validate_json(body).model
            work = service.work(request.url.path, name, body, client_of(request))
            return Reply(work, service)
        except ClientDisconnect:
            service.metrics.hung_up()
            return Response(status_code=_CLIENT_CLOSED_REQUEST)

    for path in _ROUTES:
        api.post(path)(answer)
    if pages is not None:
        api.include_router(pages)
    return service.metrics.counted(AccessControl(api, key, hosts))
