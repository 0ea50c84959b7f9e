"""Errors in OpenAI's format: `{"error": {"message", "type", "param", "code"}}` with an HTTP status.

A client receives the details of errors in its request, and never the details of internal errors.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request as HTTPRequest
from starlette.responses import JSONResponse, Response

from tot.decoders.errors import ModelError, OptionError, RefusedError, RequestError, ServerError

log = logging.getLogger(__name__)

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
}
_MAX_MESSAGE = 400
"""Maximum length (characters) of a message, which may quote the client's input."""


@dataclass(eq=False)
class ServingError(Exception):
    """A request was rejected or has failed."""

    status: int
    """The HTTP status."""
    message: str
    param: str | None = None
    code: str | None = None
    retry_after: int | None = None
    """Seconds after which the client may retry."""

    def body(self) -> dict[str, Any]:
        """Return the JSON body, for a reply or an event of a stream."""
        kind = _TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        error = {"message": _shortened(self.message), "type": kind, "param": self.param, "code": self.code}
        return {"error": error}


def invalid(message: str, field: str) -> ServingError:
    return ServingError(400, message, field, "invalid_value")


def unsupported(field: str) -> ServingError:
    reason = "is not supported, and ignoring it could change the result: remove it"
    return ServingError(400, f"{_shortened(field[:60])} {reason}", field[:60], "unsupported_parameter")


def retry_later(message: str, code: str, status: int = 503) -> ServingError:
    return ServingError(status, f"{message}: retry later", None, code, retry_after=1)


def _shortened(text: str, length: int = _MAX_MESSAGE) -> str:
    """Return a text as one line of limited length (characters) that can be encoded as UTF-8."""
    line = " ".join(text.encode(errors="replace").decode().split())
    return line if len(line) <= length else f"{line[: length - 1]}…"


def as_serving_error(error: Exception) -> ServingError:
    """Convert any exception to the error for the client. Errors of the model and internal errors are logged."""
    match error:
        case ServingError():
            return error
        case RefusedError() | ServerError():  # their messages have the server's address
            log.error("a request failed: %s", error)
            does = "fails" if error.status >= 500 else "rejects the request"
            message = f"the model's server {does}{f': {error.said}' * bool(error.said)}"
            return ServingError(error.status, message, code=error.code, retry_after=error.retry_after)
        case RequestError():
            return ServingError(400, str(error), code=error.code)
        case OptionError():
            return ServingError(400, str(error))
        case ValidationError():
            return _of_field(error)
        case HTTPException():
            return ServingError(error.status_code, str(error.detail))
        case ModelError():
            log.error("a request failed: %s", error)
            return ServingError(500, str(error), code="model_error")
    log.error("a request failed", exc_info=error)
    return ServingError(500, "internal error: see the log of the server", code="internal_error")


def _of_field(error: ValidationError) -> ServingError:
    """Convert the first validation error of a body, naming the field."""
    first = error.errors(include_url=False, include_context=False)[0]
    field = ".".join(str(part) for part in first["loc"])
    kind, message, given = first["type"], first["msg"].removeprefix("Value error, "), first["input"]
    if kind == "extra_forbidden":
        return unsupported(field)
    if kind == "missing":
        return ServingError(400, f"{field} is missing", field, "missing_required_parameter")
    if kind == "json_invalid":
        return ServingError(400, f"the body is not JSON ({message})", code="invalid_json")
    if isinstance(given, int | float | str) and kind != "value_error":
        message += f" (it is {_shortened(repr(given), 60)})"
    return ServingError(400, f"{field}: {message}" if field else message, field or None, "invalid_value")


async def reply(request: HTTPRequest, error: Exception) -> Response:
    """Handle any exception: return its error response."""
    found = as_serving_error(error)
    if found.status == 404 and found.code is None:
        found = ServingError(404, f"{request.url.path} does not exist: the API is under /v1", code="not_found")
    if found.status == 405:
        found = ServingError(405, f"{request.url.path} does not support {request.method}", code="method_not_allowed")
    headers = {} if found.retry_after is None else {"Retry-After": str(found.retry_after)}
    if found.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    kind = {"type": "error"} if request.url.path.startswith("/v1/messages") else {}  # as in Anthropic's API
    return JSONResponse({**kind, **found.body()}, found.status, headers)
