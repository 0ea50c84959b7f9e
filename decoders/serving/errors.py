"""Every error as OpenAI's clients expect it: `{"error": {"message", "type", "param", "code"}}` and a status.

What may be told to a client is decided here: what is wrong with its request, never what went wrong inside.
"""

from __future__ import annotations

import logging
from typing import Any

from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request as HTTPRequest
from starlette.responses import JSONResponse, Response

from tot.decoders.errors import ModelError, OptionError, RequestError

log = logging.getLogger(__name__)

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
}
_LONGEST = 400
"""Characters of a message; what a client sent may stand in it."""


class ServingError(Exception):
    """A request that is refused or has failed, with its HTTP status."""

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        code: str | None = None,
        retry_after: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.retry_after = retry_after
        """Seconds after which the client may try again."""

    def body(self) -> dict[str, Any]:
        """What is sent, in a reply or as an event of a stream."""
        kind = _TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        said = {"message": shortened(self.message), "type": kind, "param": self.param, "code": self.code}
        return {"error": said}

    def response(self) -> JSONResponse:
        headers = {} if self.retry_after is None else {"Retry-After": str(self.retry_after)}
        if self.status == 401:
            headers["WWW-Authenticate"] = "Bearer"
        return JSONResponse(self.body(), self.status, headers)


def shortened(text: str) -> str:
    """One line of at most 400 characters that can be encoded, whatever the text holds."""
    line = " ".join(text.encode(errors="replace").decode().split())
    return line if len(line) <= _LONGEST else f"{line[: _LONGEST - 1]}…"


def understood(error: Exception) -> ServingError:
    """What a client is told of any exception; those that are nobody's request are logged, and called an error here."""
    if isinstance(error, ServingError):
        return error
    if isinstance(error, RequestError | OptionError):
        return ServingError(400, str(error))
    if isinstance(error, ValidationError):
        return invalid(error)
    if isinstance(error, HTTPException):
        return ServingError(error.status_code, str(error.detail))
    if isinstance(error, ModelError):
        log.error("a request failed: %s", error)
        return ServingError(500, str(error), code="model_error")
    log.error("a request failed", exc_info=error)
    return ServingError(500, "an error inside the server, which its log tells of", code="internal_error")


def invalid(error: ValidationError) -> ServingError:
    """The first thing wrong with a body, naming the field."""
    first = error.errors(include_url=False, include_context=False)[0]
    place = ".".join(str(part) for part in first["loc"])
    kind, message = first["type"], first["msg"].removeprefix("Value error, ")
    if kind == "extra_forbidden":
        return ServingError(
            400,
            f"{shortened(place)[:60]} is not supported here, and to ignore it could change the result: leave it out",
            place[:60],
            "unsupported_parameter",
        )
    if kind == "missing":
        return ServingError(400, f"{place} is missing", place, "missing_required_parameter")
    if kind == "json_invalid":
        return ServingError(400, f"the body is not JSON ({message})", code="invalid_json")
    given = first["input"]
    if isinstance(given, int | float | str) and kind != "value_error":
        message += f" (it is {shortened(repr(given))[:60]})"
    return ServingError(400, f"{place}: {message}" if place else message, place or None, "invalid_value")


async def reply(request: HTTPRequest, error: Exception) -> Response:
    """An exception handler for all kinds."""
    told = understood(error)
    if told.status == 404 and told.code is None:
        told = ServingError(404, f"there is nothing at {request.url.path}: the API is under /v1", code="not_found")
    if told.status == 405:
        told = ServingError(405, f"{request.url.path} does not take {request.method}", code="method_not_allowed")
    return told.response()
