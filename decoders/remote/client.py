"""Post JSON to one server over HTTP, in attempts, until a reply or a permanent error arrives.

Errors quote the server's message as one short line, without control characters and without the API key.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import random
import re
from dataclasses import dataclass
from typing import Any, TypeVar
from urllib.parse import quote, urlsplit

import httpx2
from pydantic import BaseModel, ValidationError

from tot.decoders.errors import OptionError, RefusedError, ServerError, TotError
from tot.decoders.remote.body import TOKENIZE
from tot.decoders.remote.network import is_loopback, key_from, retry_after
from tot.decoders.remote.options import KEY_VARIABLE, RemoteOptions
from tot.decoders.remote.servers import SERVERS, recognized

log = logging.getLogger(__name__)
_Reply = TypeVar("_Reply", bound=BaseModel)

_CONNECT_SECONDS = 10.0
_FIRST_WAIT, _LONGEST_WAIT = 0.5, 8.0
"""Seconds between two attempts; each wait is twice the one before."""
_MAX_RETRY_AFTER = 120
"""Longest Retry-After (seconds) to wait for."""
_MAX_REPLY = 32 * 2**20
"""Maximum size (bytes) of a reply, decompressed."""
_MAX_REPEATS = 4
"""Consecutive attempts of a request with the same error message after which the error is permanent."""
_MAX_FAILURES = 3
"""Consecutive failed requests after which the server is reported as failing, not the request."""
_MAX_MESSAGE = 200
"""Maximum length (characters) of a server's message in an error."""
_NO_MESSAGE = "no error message"
_MESSAGE_FIELDS = ("error", "detail", "message")
_OF_THE_CONTENT = ("content-encoding", "content-length", "transfer-encoding")
_REJECTIONS = (400, 413, 422, 431)
_PASSED_ON = {429: 429, 503: 503, 504: 504, 529: 503}
"""Statuses that a proxy passes on to its client; others become a 502."""
_ABOUT_THE_REQUEST = re.compile(
    r"(?i)not (?:supported|allowed|implemented|permitted|enabled)|unsupported|only (?:one|1)\b|jinja|template"
    r"|\billegal\b|\binvalid (?:param|argument|value|request|input|field)|(?:unknown|unexpected|unrecognized) \w+"
    r"|exceeds?\b.*\b(?:context|length|size)|context (?:size|length|window)|must (?:be|not|alternate)"
    r"|index out of range"  # vLLM with speculative decoding, for `logprob_token_ids`
)
"""Messages of a 500 that the request caused: llama-server, llama-cpp-python and others do not send 400."""
_ABOUT_AN_OUTAGE = re.compile(
    r"(?i)\b(?:busy|overloaded|capacity|rate.?limit\w*|too many requests|try again|retry|loading|starting|unavailable"
    r"|time(?:d )?.?out)\b"
)
"""Messages of temporary errors, of any status."""
_UNKNOWN_MODEL = re.compile(
    r"(?i)\bmodel\b.*(?:not found|does not exist|doesn't exist|unknown)|model_not_found|; requested '"
)


@dataclass(eq=False)
class _AttemptError(Exception):
    """An attempt failed, and another one may succeed."""

    why: str
    status: int = 502
    said: str = ""
    wait: float = 0.0
    """The server's Retry-After in seconds."""
    retried: bool = True
    request: bool = False
    """Whether the request may be the cause."""


class Client:
    """One model on one server, for use in one event loop."""

    def __init__(self, options: RemoteOptions, model: str) -> None:
        """Raises OptionError if the key or a proxy in the environment is invalid."""
        self.options = options
        self.model = model
        self.models: list[str] = []
        """The models that the server lists; set by `check`."""
        self.server = SERVERS.get(options.server, SERVERS["openai"])
        """The kind of server; set by `check`, unless the options name it."""
        self._key = key_from(KEY_VARIABLE) or None
        self._where = f"the server at {options.base_url}"
        self._failed_in_a_row = 0
        """Failed requests that the server may have caused, since the last valid reply."""
        self._warned: set[str] = set()
        host = urlsplit(options.base_url).hostname or ""
        # Requests to this machine bypass HTTP_PROXY.
        local = is_loopback(host) or host in ("0.0.0.0", "::")
        try:
            self._http = httpx2.AsyncClient(
                headers={"Authorization": f"Bearer {self._key}"} if self._key else None,
                timeout=httpx2.Timeout(None, connect=_CONNECT_SECONDS),
                limits=httpx2.Limits(max_keepalive_connections=options.concurrency),
                mounts={f"all://[{host}]" if ":" in host else f"all://{host}": None} if local else None,
                follow_redirects=True,
            )
        except (ImportError, ValueError, httpx2.InvalidURL) as error:
            cause = str(error) if isinstance(error, ImportError) else "not a proxy address"
            raise OptionError(
                f"the proxy in HTTP_PROXY, HTTPS_PROXY or ALL_PROXY cannot be used ({cause}): unset or correct it"
            ) from None

    def __repr__(self) -> str:
        return f"{self.model!r} at {self.options.base_url}"

    def warn(self, message: str, *about: object) -> None:
        """Log a warning once per message."""
        if message not in self._warned:
            self._warned.add(message)
            log.warning(message, *about)

    async def check(self) -> None:
        """Read the list of models. Raises ServerError if the server does not answer or rejects the API key.

        The model's name is not checked: some servers list no models, or accept any name.
        """
        try:
            response = await self._sent("GET", f"{self.options.base_url}/models", _CONNECT_SECONDS)
        except _AttemptError as error:
            does = f"lists no models: {error.why}" if error.request else f"does not answer ({error.why}): start it"
            raise ServerError(f"{self._where} {does}") from None
        if response.status_code in (401, 403):
            raise self._key_refused(response.status_code)
        listed = _listed(response)
        self.models = [self.plain(str(model["id"])) for model in listed]
        if self.options.server == "auto":
            self.server = recognized(listed)

    async def post(self, path: str, body: dict[str, Any], reply: type[_Reply]) -> _Reply:
        """Send a body, with the retries of the options, and return the reply.

        Raises:
            RefusedError: The server rejects the body, fails only for this body, or has no tokenizer.
            ServerError: The server does not answer, rejects the API key, or does not have the model or the route.
        """
        base = self.options.base_url.removesuffix("/v1") if path == TOKENIZE else self.options.base_url
        failures: list[str] = []
        while True:
            try:
                result = await self._read(
                    await self._sent("POST", base + path, self.options.timeout, body), path, reply
                )
            except _AttemptError as error:
                failures.append(error.why)
                repeated = failures[-_MAX_REPEATS:] == [error.why] * _MAX_REPEATS
                permanent = error.request and repeated and not _ABOUT_AN_OUTAGE.search(error.why)
                if permanent or not error.retried or len(failures) > self.options.retries:
                    raise self._given_up(error, len(failures), body) from None
                self.warn(f"{self.options.base_url}: {error.why}; retrying up to {self.options.retries} times")
                wait = min(_LONGEST_WAIT, _FIRST_WAIT * 2 ** (len(failures) - 1))
                await asyncio.sleep(error.wait or wait * random.uniform(0.75, 1.0))
            else:
                self._failed_in_a_row = 0
                return result

    async def close(self) -> None:
        """Close all connections."""
        await self._http.aclose()

    async def _sent(self, method: str, url: str, seconds: float, body: dict[str, Any] | None = None) -> httpx2.Response:
        """Return the whole response to one request.

        Raises _AttemptError if the connection fails, or the response takes too long or is too large.
        """
        content = bytearray()
        try:
            async with asyncio.timeout(seconds), self._http.stream(method, url, json=body) as response:
                async for piece in response.aiter_bytes():
                    content += piece
                    if len(content) > _MAX_REPLY:
                        limit = f"{_MAX_REPLY >> 20} MiB; check base_url, or lower n or max_tokens"
                        raise _AttemptError(f"its reply is larger than {limit}", retried=False, request=True)
        except (TimeoutError, httpx2.TimeoutException) as error:
            waited = _CONNECT_SECONDS if isinstance(error, httpx2.ConnectTimeout) else seconds
            raise _AttemptError(f"no complete reply in {waited:g} s", status=504) from None
        except httpx2.RequestError as error:
            raise _AttemptError(self.plain(str(error)) or type(error).__name__) from None
        headers = [(name, value) for name, value in response.headers.multi_items() if name not in _OF_THE_CONTENT]
        return httpx2.Response(response.status_code, headers=headers, content=bytes(content), request=response.request)

    async def _read(self, response: httpx2.Response, path: str, reply: type[_Reply]) -> _Reply:
        """Parse the reply in a response. Raises _AttemptError if another attempt may succeed."""
        if path == TOKENIZE and response.status_code < 500:
            try:
                return reply.model_validate_json(response.content)
            except ValidationError:  # no such route, or a different one with the same name
                raise RefusedError(f"{self._where} has no tokenizer", "") from None
        if response.request.method != "POST":  # a 301 turns a POST into a GET without a body
            raise ServerError(
                f"{self.options.base_url} is not the server's address: it redirects to "
                f"{self.plain(str(response.url.copy_with(query=None)))}; set base_url to that address"
            )
        if not response.is_success:
            raise await self._fault(response, path)
        media = response.headers.get("content-type", "no content type").partition(";")[0]
        if "html" in media:
            raise ServerError(
                f"{self.options.base_url} replies with a web page: check base_url, which usually ends in /v1"
            )
        problem = f"cannot parse its reply ({media}): "
        try:
            # Servers send NaN and invalid UTF-8, which this parser accepts.
            data = json.loads(response.text.removeprefix("\ufeff"))
        except (ValueError, RecursionError):
            raise _AttemptError(self.plain(problem + "not JSON"), request=True) from None
        if isinstance(data, dict) and not data.get("choices") and any(data.get(name) for name in _MESSAGE_FIELDS):
            raise _AttemptError(f"its reply is an error: {self._said(response)}", request=True)
        try:
            return reply.model_validate(data)
        except ValidationError as error:
            first = error.errors(include_input=False, include_url=False)[0]
            place, message = ".".join(map(str, first["loc"])), first["msg"].removeprefix("Value error, ")
            raise _AttemptError(self.plain(problem + place + ": " * bool(place) + message), request=True) from None

    # -- errors -------------------------------------------------------------------------------------------------------

    async def _fault(self, response: httpx2.Response, path: str) -> Exception:
        """Return the error for a status: an _AttemptError if another attempt may succeed."""
        status, said = response.status_code, self._said(response)
        about_the_request = status in (500, 501) and _ABOUT_THE_REQUEST.search(said) is not None
        if status in (401, 403):
            return self._key_refused(status)
        if status == 404 or (status in _REJECTIONS and _UNKNOWN_MODEL.search(response.text)):
            try:
                listed = _listed(await self._sent("GET", f"{self.options.base_url}/models", _CONNECT_SECONDS))
            except _AttemptError:
                listed = []
            if self.model not in (models := [str(model["id"]) for model in listed]):
                known = ", ".join(map(self.plain, models[:20])) or "none listed"
                return ServerError(
                    f"{self._where} has no model {self.model!r}, or no {path} ({status}: {said}). Its models: {known}. "
                    "Give one of them as the model, and a base_url such as http://host:port/v1"
                )
        if status == 404:
            return ServerError(f"{self._where} has no {path} (404: {said}): check base_url, which usually ends in /v1")
        if about_the_request or status in _REJECTIONS:
            return RefusedError(f"{self._where} rejects the request ({status}): {said}", said)
        wait, passed_on = retry_after(response.headers), _PASSED_ON.get(status, 502)
        if (status < 500 and status not in (408, 409, 429)) or b"insufficient_quota" in response.content:
            return ServerError(f"{self._where} fails ({status}): {said}", said, passed_on, math.ceil(wait) or None)
        why = f"{status}: {said}"
        if too_long := wait > _MAX_RETRY_AFTER:
            why += f"; its Retry-After is {wait:.0f} s, longer than the maximum of {_MAX_RETRY_AFTER} s"
        request = status in (500, 501) and said != _NO_MESSAGE and not _ABOUT_AN_OUTAGE.search(said) and not too_long
        return _AttemptError(why, passed_on, said, wait, retried=not too_long, request=request)

    def _key_refused(self, status: int) -> ServerError:
        """Return the error, without the server's message, which may contain the API key."""
        cause = f"the key in {KEY_VARIABLE}" if self._key else f"a request without a key: set {KEY_VARIABLE}"
        return ServerError(f"{self._where} rejects ({status}) {cause}")

    def _given_up(self, error: _AttemptError, attempts: int, body: dict[str, Any]) -> TotError:
        """Return the error for a request that fails in every attempt.

        Only requests for one sample count as failed, as a request for several is repeated as requests for one.
        """
        counted = f"{error.why}, {attempts} times" if attempts > 1 else error.why
        if not error.request:
            message = f"{self._where} does not answer ({counted}): start or restart it, then resume with --resume"
            return ServerError(message, error.said, error.status, math.ceil(error.wait) or None)
        self._failed_in_a_row += body.get("n", 1) == 1
        if self._failed_in_a_row >= _MAX_FAILURES:
            message = f"{self._where} fails for every request ({counted}): restart it, then resume with --resume"
            return ServerError(message, error.why)
        return RefusedError(f"{self._where} fails for this request ({counted})", error.why, 502)

    def _said(self, response: httpx2.Response) -> str:
        """Return the error message in a response, for any of the formats that servers use."""
        try:
            data: Any = json.loads(response.content)
        except (ValueError, RecursionError):
            data = "" if "html" in response.headers.get("content-type", "") else response.text
        for name in _MESSAGE_FIELDS:
            if isinstance(data, dict) and data.get(name):
                data = data[name]
        return self.plain(data if isinstance(data, str) else json.dumps(data) if data else "") or _NO_MESSAGE

    def plain(self, text: str) -> str:
        """Return a server's text as one short line, without control characters and without the API key."""
        key = self._key
        for encoded in (key, json.dumps(key)[1:-1], quote(key, safe="")) if key else ():
            text = text.replace(encoded, "…")
        line = " ".join("".join(c if c.isprintable() else " " for c in text[:10_000]).split())
        return line if len(line) <= _MAX_MESSAGE else line[: _MAX_MESSAGE - 1] + "…"


def _listed(response: httpx2.Response) -> list[dict[str, Any]]:
    """Return the models in a response to /models; empty if it has another form."""
    try:
        return [model for model in response.json()["data"] if isinstance(model, dict) and "id" in model]
    except (ValueError, LookupError, TypeError, RecursionError):
        return []
