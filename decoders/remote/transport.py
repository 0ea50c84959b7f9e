"""The HTTP client below the `openai` package: sends one attempt of a request and decides whether to retry it.

The package retries after a dropped connection, a timeout, a 429 or a 5xx. This client adds a total time limit per
attempt, parses replies and marks permanent errors, which the package would otherwise retry for a minute.
"""

from __future__ import annotations

import asyncio
import email.utils
import json
import logging
import math
import re
import time
from contextlib import suppress
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote, urlsplit

import httpx2
import openai
from pydantic import ValidationError

from tot.decoders.errors import OptionError
from tot.decoders.remote.network import is_loopback
from tot.decoders.remote.options import RemoteOptions
from tot.decoders.remote.reply import ServerReply, without_surrogates
from tot.decoders.request import Usage

log = logging.getLogger(__name__)

MAX_WAIT = 120.0
"""Longest Retry-After (seconds) to wait for; the `openai` package has the same limit."""
ATTEMPT = "x-stainless-retry-count"
"""The `openai` package's header for the number of an attempt, from 0."""
_MAX_REPLY = 32 * 2**20
"""Maximum size (bytes) of a reply, decompressed."""
_MAX_REPEATS = 4
"""Consecutive attempts with the same error message after which an error is permanent."""
_MAX_MESSAGE = 200
"""Maximum length (characters) of a server's message in an error."""
_NO_MESSAGE = "no error message"
_ABOUT_THE_REQUEST = re.compile(
    r"(?i)not (?:supported|allowed|implemented|permitted|enabled)|unsupported|only (?:one|1)\b|jinja|template"
    r"|\billegal\b|\binvalid (?:param|argument|value|request|input|field)|(?:unknown|unexpected|unrecognized) \w+"
    r"|exceeds?\b.*\b(?:context|length|size)|context (?:size|length|window)|must (?:be|not|alternate)"
)
"""Messages of a 500 that the request caused: llama-server, llama-cpp-python and others do not send 400."""

_ABOUT_AN_OUTAGE = re.compile(
    r"(?i)\b(?:busy|overloaded|capacity|rate.?limit\w*|too many requests|try again|retry|loading|starting|unavailable"
    r"|time(?:d )?.?out)\b"
)
"""Messages of temporary errors, of any status."""

failures: ContextVar[list[str]] = ContextVar("failures")
"""Error messages of the failed attempts of the current request."""


@dataclass
class Spent:
    """Resources used by a decoder's requests so far."""

    requests: int = 0
    """Requests, without retries."""
    retries: int = 0
    usage: Usage = field(default_factory=Usage)
    """Reused tokens are prompt tokens from the server's cache, if it reports them."""


class LastingError(openai.OpenAIError):
    """Every attempt got an invalid reply, or one got a reply above the size limit. The `openai` package does not retry
    after this error."""


class RedirectedError(openai.OpenAIError):
    """The server redirected the request to another address, which drops its body."""


class Attempts(openai.DefaultAsyncHttpxClient):
    """Sends single attempts for the `openai` package."""

    def __init__(self, options: RemoteOptions, spent: Spent, secret: str | None) -> None:
        """Raises OptionError if a proxy in the environment is invalid."""
        host = urlsplit(options.base_url).hostname or ""
        # Requests to this machine bypass HTTP_PROXY.
        local = is_loopback(host) or host in ("0.0.0.0", "::")
        direct = {f"all://[{host}]" if ":" in host else f"all://{host}": None} if local else None
        try:
            super().__init__(mounts=direct)
        except (ImportError, ValueError, httpx2.InvalidURL) as error:
            cause = str(error) if isinstance(error, ImportError) else "not a proxy address"
            raise OptionError(
                f"the proxy in HTTP_PROXY, HTTPS_PROXY or ALL_PROXY cannot be used ({cause}): unset or correct it"
            ) from None
        self.failed_in_a_row = 0
        """Consecutive failed requests that the server may have caused, since the last valid reply."""
        self._options = options
        self._spent = spent
        self._secret = secret
        self._failing = False
        self._last_success = 0.0
        """Time of the last valid reply, by `time.monotonic`."""

    async def send(self, request: httpx2.Request, **rest: Any) -> httpx2.Response:
        """Return the response to one attempt. `extensions["reply"]` has the parsed completion, if it is no web page."""
        sent_at, attempt = time.monotonic(), int(request.headers.get(ATTEMPT, 0))
        self._spent.retries += attempt > 0
        limit: float | None = request.extensions.get("timeout", {}).get("read")
        try:
            async with asyncio.timeout(limit):
                response = await _whole(await super().send(request, **{**rest, "stream": True}))
        except TimeoutError:
            self._log_failure(request, sent_at, f"no complete reply in {limit:g} s", attempt)
            raise httpx2.ReadTimeout("no complete reply in time", request=request) from None
        except httpx2.RequestError as error:
            self._log_failure(request, sent_at, plain(str(error), self._secret) or type(error).__name__, attempt)
            raise
        if response.request.method != request.method:  # a 301 turns a POST into a GET without a body
            raise RedirectedError(f"it redirects to {plain(str(response.url.copy_with(query=None)), self._secret)}")
        if response.is_success:
            if request.url.path.endswith("/completions") and "html" not in kind_of(response):
                try:
                    response.extensions["reply"] = _read(response, self._secret)
                except ValueError as error:
                    why = plain(str(error), self._secret)
                    if self._is_permanent(why) or attempt >= self._options.retries:
                        raise LastingError(why) from None
                    self._log_failure(request, sent_at, why, attempt)
                    raise httpx2.DecodingError(why, request=request) from None
            self._failing, self._last_success, self.failed_in_a_row = False, time.monotonic(), 0
        elif may_pass(response):
            why = f"{response.status_code}: {said(response, self._secret)}"
            waits_too_long = retry_after(response) > MAX_WAIT
            if is_hopeless(request, response) or waits_too_long or (says_why(response) and self._is_permanent(why)):
                response.headers["x-should-retry"] = "false"
            else:
                self._log_failure(request, sent_at, why, attempt)
        return response

    def _is_permanent(self, why: str) -> bool:
        """Record a failure. Return True after `_MAX_REPEATS` consecutive equal ones that are not due to an outage."""
        history = failures.get([])
        history.append(why)
        return history[-_MAX_REPEATS:] == [why] * _MAX_REPEATS and not _ABOUT_AN_OUTAGE.search(why)

    def _log_failure(self, request: httpx2.Request, sent_at: float, why: str, attempt: int) -> None:
        """Log a failure once per outage, not once per request.

        A request sent before the last valid reply belongs to an earlier outage.
        """
        retried = request.method == "POST" and attempt < self._options.retries
        if retried and not self._failing and sent_at > self._last_success:
            self._failing = True
            log.warning("%s: %s; retrying up to %d times", self._options.base_url, why, self._options.retries)


async def _whole(response: httpx2.Response) -> httpx2.Response:
    """Return a response with its decompressed body. Raises LastingError if that is larger than `_MAX_REPLY`."""
    body = bytearray()
    try:
        async for piece in response.aiter_bytes():
            body += piece
            if len(body) > _MAX_REPLY:
                raise LastingError(
                    f"its reply is larger than {_MAX_REPLY >> 20} MiB; check base_url, or lower n or max_tokens"
                )
    finally:
        await response.aclose()
    headers = [(name, value) for name, value in response.headers.multi_items() if name.lower() not in _OF_THE_BODY]
    about: dict[str, Any] = {"request": response.request, "extensions": response.extensions}
    return httpx2.Response(response.status_code, headers=headers, content=bytes(body), **about)


def _read(response: httpx2.Response, secret: str | None) -> ServerReply:
    """Parse the reply in a response. Raises ValueError if it is invalid."""
    try:
        # Servers send lone surrogates, NaN and invalid UTF-8, which this parser accepts.
        data = without_surrogates(json.loads(response.text.removeprefix("\ufeff")))
    except (ValueError, RecursionError):
        raise ValueError(f"cannot parse its reply ({kind_of(response)}): not JSON") from None
    if isinstance(data, dict) and not data.get("choices") and any(data.get(name) for name in _ERROR_FIELDS):
        raise ValueError(f"its reply is an error: {said(response, secret)}")
    try:
        return ServerReply.model_validate(data)
    except ValidationError as error:
        first = error.errors(include_input=False, include_url=False)[0]
        location = ".".join(map(str, first["loc"]))
        message = first["msg"].removeprefix("Value error, ")
        raise ValueError(
            f"cannot parse its reply ({kind_of(response)}): {location}{': ' if location else ''}{message}"
        ) from None


def may_pass(response: httpx2.Response) -> bool:
    """Return True for a status after which the `openai` package retries."""
    return response.status_code in (408, 409, 429) or response.status_code >= 500


def says_why(response: httpx2.Response) -> bool:
    """Return True for a 500 or 501 with a message that does not describe an outage."""
    why = said(response, None)
    return response.status_code in (500, 501) and why != _NO_MESSAGE and not _ABOUT_AN_OUTAGE.search(why)


def is_about_the_request(response: httpx2.Response) -> bool:
    """Return True for a 500 or 501 whose message describes an error in the request."""
    return response.status_code in (500, 501) and _ABOUT_THE_REQUEST.search(said(response, None)) is not None


def is_hopeless(request: httpx2.Request, response: httpx2.Response) -> bool:
    """Return True for permanent failures with a status that is otherwise retried.

    These are an exhausted quota (429), an invalid request (500), and `logprob_token_ids` with speculative decoding in
    vLLM 0.32 (500).
    """
    if response.status_code == 429:
        return b"insufficient_quota" in response.content
    return is_about_the_request(response) or (
        b"index out of range" in response.content and b"logprob_token_ids" in request.content
    )


def retry_after(response: httpx2.Response) -> int:
    """Return the seconds of the server's Retry-After; 0 if it has none."""
    seconds = 0.0
    for name, unit in (("retry-after-ms", 1000), ("retry-after", 1)):
        with suppress(ValueError):
            seconds = seconds or float(response.headers.get(name, "")) / unit
    with suppress(ValueError, OverflowError):
        if not seconds and (date := email.utils.parsedate_tz(response.headers.get("retry-after", ""))) is not None:
            seconds = email.utils.mktime_tz(date) - time.time()
    return math.ceil(seconds) if 0 < seconds < math.inf else 0


def kind_of(response: httpx2.Response) -> str:
    """Return the media type of a response."""
    return response.headers.get("content-type", "no content type").partition(";")[0]


_OF_THE_BODY = ("content-encoding", "content-length", "transfer-encoding")
_ERROR_FIELDS = ("error", "detail", "message")


def said(response: httpx2.Response, secret: str | None) -> str:
    """Return the error message in a response, for any of the formats that servers use."""
    try:
        data: Any = json.loads(response.content)
    except (ValueError, RecursionError):
        data = "" if "html" in kind_of(response) else response.content.decode("utf-8", "replace")
    for name in _ERROR_FIELDS:
        if isinstance(data, dict) and data.get(name):
            data = data[name]
    text = data if isinstance(data, str) else json.dumps(data) if data else ""
    return plain(text, secret) or _NO_MESSAGE


def plain(text: str, secret: str | None) -> str:
    """Return a server's text as one short line, without control characters and without the API key."""
    for encoded in (secret, json.dumps(secret)[1:-1], quote(secret, safe="")) if secret else ():
        text = text.replace(encoded, "…")
    line = " ".join("".join(c if c.isprintable() else " " for c in text[:10_000]).split())
    return line if len(line) <= _MAX_MESSAGE else line[: _MAX_MESSAGE - 1] + "…"
