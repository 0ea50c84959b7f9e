"""The HTTP client below the `openai` package: one attempt at a request, and whether another one is worth it.

The package repeats a request after a dropped connection, a timeout, a 429 or a 5xx. Here attempts get a total time
limit, replies are read, and an error that will not pass is marked so, because the package would repeat it for a minute.
"""

from __future__ import annotations

import asyncio
import email.utils
import json
import logging
import math
import re
import time
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
"""Longest Retry-After in seconds that is waited for; the `openai` package has the same bound."""
ATTEMPT = "x-stainless-retry-count"
"""The header in which the `openai` package numbers the attempts at a request, from 0."""
_SAME = 4
"""Attempts that fail in the same words after which an error counts as lasting."""
_LONGEST = 200
"""Characters of a server's words that an error repeats."""
_SAYS_NOTHING = "it does not say why"
_ABOUT_THE_REQUEST = re.compile(
    r"(?i)not (?:supported|allowed|implemented|permitted|enabled)|unsupported|only (?:one|1)\b|jinja|template"
    r"|\billegal\b|\binvalid (?:param|argument|value|request|input|field)|(?:unknown|unexpected|unrecognized) \w+"
    r"|exceeds?\b.*\b(?:context|length|size)|context (?:size|length|window)|must (?:be|not|alternate)"
)
"""What a 500 says where the request is at fault: llama-server and llama-cpp-python, among others, send no 400."""

_ABOUT_AN_OUTAGE = re.compile(
    r"(?i)\b(?:busy|overloaded|capacity|rate.?limit\w*|too many requests|try again|retry|loading|starting|unavailable"
    r"|time(?:d )?.?out)\b"
)
"""What an error says that passes, whatever its status."""

failures: ContextVar[list[str]] = ContextVar("failures")
"""Why the attempts at the current request failed so far."""


@dataclass
class Spent:
    """What a decoder's requests have used so far."""

    requests: int = 0
    """Requests, without repetitions."""
    retries: int = 0
    usage: Usage = field(default_factory=Usage)
    """Reused are prompt tokens that the server had cached, where it reports them."""


class LastingError(openai.OpenAIError):
    """Every attempt got a reply that cannot be used. The package does not repeat a request that ends in this."""


class RedirectedError(openai.OpenAIError):
    """The request was sent to another address without its body."""


class Attempts(openai.DefaultAsyncHttpxClient):
    """Sends single attempts for the `openai` package."""

    def __init__(self, options: RemoteOptions, spent: Spent, secret: str | None) -> None:
        """Raises OptionError where the environment names a proxy that cannot be used."""
        host = urlsplit(options.base_url).hostname or ""
        # No proxy leads back to this machine, whatever HTTP_PROXY says.
        near = is_loopback(host) or host in ("0.0.0.0", "::")
        direct = {f"all://[{host}]" if ":" in host else f"all://{host}": None} if near else None
        try:
            super().__init__(mounts=direct)
        except (ImportError, ValueError, httpx2.InvalidURL) as error:
            what = str(error) if isinstance(error, ImportError) else "not an address of a proxy"
            raise OptionError(
                f"the proxy in HTTP_PROXY, HTTPS_PROXY or ALL_PROXY cannot be used ({what}): unset or correct it"
            ) from None
        self.failed_in_a_row = 0
        """Requests that were given up since the last good reply, for reasons that may lie in the server."""
        self._options = options
        self._spent = spent
        self._secret = secret
        self._in_trouble = False
        self._well_at = 0.0
        """When the last good reply came, by `time.monotonic`."""

    async def send(self, request: httpx2.Request, **rest: Any) -> httpx2.Response:
        """Return the response to one attempt. A completion's reply is in `extensions["reply"]`, except a web page."""
        sent_at, before = time.monotonic(), int(request.headers.get(ATTEMPT, 0))
        self._spent.retries += before > 0
        limit: float | None = request.extensions.get("timeout", {}).get("read")
        try:
            async with asyncio.timeout(limit):
                response = await super().send(request, **rest)
        except TimeoutError:
            self._failed(request, sent_at, f"no whole reply in {limit:g} s", before)
            raise httpx2.ReadTimeout("no whole reply in time", request=request) from None
        except httpx2.RequestError as error:
            self._failed(request, sent_at, plain(str(error), self._secret) or type(error).__name__, before)
            raise
        if response.request.method != request.method:  # a 301 makes a GET of a POST, and the prompt is lost
            raise RedirectedError(f"it redirects to {plain(str(response.url.copy_with(query=None)), self._secret)}")
        if response.is_success:
            if request.url.path.endswith("/completions") and "html" not in kind_of(response):
                try:
                    response.extensions["reply"] = _read(response, self._secret)
                except ValueError as error:
                    why = plain(str(error), self._secret)
                    if self._lasts(why) or before >= self._options.retries:
                        raise LastingError(why) from None
                    self._failed(request, sent_at, why, before)
                    raise httpx2.DecodingError(why, request=request) from None
            self._in_trouble, self._well_at, self.failed_in_a_row = False, time.monotonic(), 0
        elif may_pass(response):
            why = f"{response.status_code}: {said(response, self._secret)}"
            if is_hopeless(request, response) or too_long(response) or (says_why(response) and self._lasts(why)):
                response.headers["x-should-retry"] = "false"
            else:
                self._failed(request, sent_at, why, before)
        return response

    def _lasts(self, why: str) -> bool:
        """Record why an attempt failed. Returns True for the fourth time in a row for a reason that no outage gives."""
        seen = failures.get([])
        seen.append(why)
        return seen[-_SAME:] == [why] * _SAME and not _ABOUT_AN_OUTAGE.search(why)

    def _failed(self, request: httpx2.Request, sent_at: float, why: str, before: int) -> None:
        """Log a failure once an outage, not once a request: a request sent before the last good reply failed in an
        outage that is over."""
        more = request.method == "POST" and before < self._options.retries
        if more and not self._in_trouble and sent_at > self._well_at:
            self._in_trouble = True
            where, times = self._options.base_url, self._options.retries
            log.warning("%s: %s; trying again, up to %d times", where, why, times)


def _read(response: httpx2.Response, secret: str | None) -> ServerReply:
    """Return the reply in a response. Raises ValueError that says why it is not one."""
    try:
        # Python's parser takes half surrogates, NaN and a byte that is not UTF-8, all of which servers send.
        found = without_surrogates(json.loads(response.text.removeprefix("\ufeff")))
    except (ValueError, RecursionError):
        raise ValueError(f"its reply ({kind_of(response)}) can't be read: it is not JSON") from None
    if isinstance(found, dict) and not found.get("choices") and any(found.get(name) for name in _ERROR_FIELDS):
        raise ValueError(f"it replies with an error: {said(response, secret)}")
    try:
        return ServerReply.model_validate(found)
    except ValidationError as error:
        first = error.errors(include_input=False, include_url=False)[0]
        place = ".".join(map(str, first["loc"]))
        message = first["msg"].removeprefix("Value error, ")
        raise ValueError(
            f"its reply ({kind_of(response)}) can't be read: {place}{': ' if place else ''}{message}"
        ) from None


def may_pass(response: httpx2.Response) -> bool:
    """Return True for a status that the package repeats."""
    return response.status_code in (408, 409, 429) or response.status_code >= 500


def says_why(response: httpx2.Response) -> bool:
    """Return True for a failure of the server's own code that comes with a message, and not one about an outage."""
    why = said(response, None)
    return response.status_code in (500, 501) and why != _SAYS_NOTHING and not _ABOUT_AN_OUTAGE.search(why)


def is_about_the_request(response: httpx2.Response) -> bool:
    """Return True for a 500 whose message faults the request."""
    return response.status_code in (500, 501) and _ABOUT_THE_REQUEST.search(said(response, None)) is not None


def is_hopeless(request: httpx2.Request, response: httpx2.Response) -> bool:
    """Return True for failures that last whatever their status: a used-up quota, a request that the server faults by
    500, and a failure of vLLM 0.32 for `logprob_token_ids` with speculative decoding."""
    if response.status_code == 429:
        return b"insufficient_quota" in response.content
    return is_about_the_request(response) or (
        b"index out of range" in response.content and b"logprob_token_ids" in request.content
    )


def too_long(response: httpx2.Response) -> str:
    """Describe how long the server wants to be left alone, where that is longer than MAX_WAIT; else an empty text."""
    for name, unit in (("retry-after-ms", 1000), ("retry-after", 1)):
        try:
            seconds = float(response.headers.get(name, "")) / unit
        except ValueError:
            continue
        return f"{seconds:.0f} s" if MAX_WAIT < seconds < math.inf else ""
    date = email.utils.parsedate_tz(response.headers.get("retry-after", ""))
    try:
        seconds = email.utils.mktime_tz(date) - time.time() if date is not None else 0.0
    except (ValueError, OverflowError):
        return ""
    return f"{seconds:.0f} s" if seconds > MAX_WAIT else ""


def kind_of(response: httpx2.Response) -> str:
    """The media type of a response."""
    return response.headers.get("content-type", "no content type").partition(";")[0]


_ERROR_FIELDS = ("error", "detail", "message")


def said(response: httpx2.Response, secret: str | None) -> str:
    """Return a server's error message, whatever shape it has."""
    try:
        found: Any = json.loads(response.content)
    except (ValueError, RecursionError):
        found = "" if "html" in kind_of(response) else response.content.decode("utf-8", "replace")
    for name in _ERROR_FIELDS:
        if isinstance(found, dict) and found.get(name):
            found = found[name]
    text = found if isinstance(found, str) else json.dumps(found) if found else ""
    return plain(text, secret) or _SAYS_NOTHING


def plain(text: str, secret: str | None) -> str:
    """Return a server's text as one short line without control characters and without the key."""
    for spelled in (secret, json.dumps(secret)[1:-1], quote(secret, safe="")) if secret else ():
        text = text.replace(spelled, "…")
    line = " ".join("".join(c if c.isprintable() else " " for c in text[:10_000]).split())
    return line if len(line) <= _LONGEST else line[: _LONGEST - 1] + "…"
