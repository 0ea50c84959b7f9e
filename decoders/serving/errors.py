"""Errors in OpenAI's format: `{"error": {"message", "type", "param", "code"}}` with an HTTP status.

A client receives the details of errors in its request, and never the details of internal errors.
"""

from __future__ import annotations

import logging
from typing import Any

from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request as HTTPRequest
from starlette.responses import JSONResponse, Response

from tot.decoders.errors import ModelError, OptionError, RequestError, ServerError
from tot.decoders.remote.body import RefusedError

log = logging.getLogger(__name__)

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
}
_MAX_MESSAGE = 400
"""Maximum length (characters) of a message, which may quote the client's input."""


class ServingError(Exception):
    """A request was rejected or has failed; `status` is the HTTP status."""

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
        """Seconds after which the client may retry."""

    def body(self) -> dict[str, Any]:
        """Return the JSON body, for a reply or an event of a stream."""
        kind = _TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        error = {"message": shortened(self.message), "type": kind, "param": self.param, "code": self.code}
        return {"error": error}

    def response(self) -> JSONResponse:
        headers = {} if self.retry_after is None else {"Retry-After": str(self.retry_after)}
        if self.status == 401:
            headers["WWW-Authenticate"] = "Bearer"
        return JSONResponse(self.body(), self.status, headers)


def shortened(text: str) -> str:
    """Return a text as one line of at most 400 characters that can be encoded as UTF-8."""
    line = " ".join(text.encode(errors="replace").decode().split())
    return line if len(line) <= _MAX_MESSAGE else f"{line[: _MAX_MESSAGE - 1]}…"


def understood(error: Exception) -> ServingError:
    """Convert any exception to the error for the client. Errors of the model and internal errors are logged."""
    if isinstance(error, ServingError):
        return error
    if isinstance(error, RefusedError | ServerError):  # their messages have the server's address
        log.error("a request failed: %s", error)
        does = "fails" if error.status >= 500 else "rejects the request"
        message = f"the model's server {does}{f': {error.said}' * bool(error.said)}"
        return ServingError(error.status, message, code=error.code, retry_after=error.retry_after)
    if isinstance(error, RequestError):
        return ServingError(400, str(error), code=error.code)
    if isinstance(error, OptionError):
        return ServingError(400, str(error))
    if isinstance(error, ValidationError):
        return invalid(error)
    if isinstance(error, HTTPException):
        return ServingError(error.status_code, str(error.detail))
    if isinstance(error, ModelError):
        log.error("a request failed: %s", error)
        return ServingError(500, str(error), code="model_error")
    log.error("a request failed", exc_info=error)
    return ServingError(500, "internal error: see the log of the server", code="internal_error")


def invalid(error: ValidationError) -> ServingError:
    """Convert the first validation error of a body, naming the field."""
    first = error.errors(include_url=False, include_context=False)[0]
    field = ".".join(str(part) for part in first["loc"])
    kind, message = first["type"], first["msg"].removeprefix("Value error, ")
    if kind == "extra_forbidden":
        return ServingError(
            400,
            f"{shortened(field)[:60]} is not supported, and ignoring it could change the result: remove it",
            field[:60],
            "unsupported_parameter",
        )
    if kind == "missing":
        return ServingError(400, f"{field} is missing", field, "missing_required_parameter")
    if kind == "json_invalid":
        return ServingError(400, f"the body is not JSON ({message})", code="invalid_json")
    given = first["input"]
    if isinstance(given, int | float | str) and kind != "value_error":
        message += f" (it is {shortened(repr(given))[:60]})"
    return ServingError(400, f"{field}: {message}" if field else message, field or None, "invalid_value")


async def reply(request: HTTPRequest, error: Exception) -> Response:
    """Handle any exception: return its error response."""
    result = understood(error)
    if result.status == 404 and result.code is None:
        result = ServingError(404, f"{request.url.path} does not exist: the API is under /v1", code="not_found")
    if result.status == 405:
        result = ServingError(405, f"{request.url.path} does not support {request.method}", code="method_not_allowed")
    return result.response()
