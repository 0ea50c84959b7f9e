"""Server: one body sent, one reply read. The `openai` package's client sends, and repeats what may pass; what it can't
help becomes one of our errors.

A server's words are data: in an error they are one short line, without control characters and without the key.
"""

from __future__ import annotations

import json
import logging
import re
import time
from dataclasses import dataclass, field
from typing import Any

import httpx2
import openai
from pydantic import ValidationError

from tot.decoders.errors import ModelError, TotError
from tot.decoders.remote.body import RefusedError
from tot.decoders.remote.options import KEY_VARIABLE, RemoteOptions, key
from tot.decoders.remote.reply import Reply, TokenIds
from tot.decoders.request import Usage

log = logging.getLogger(__name__)

_CONNECT_SECONDS = 10.0
_BEFORE = "x-stainless-retry-count"
"""The header in which the package says how often it has sent a request before."""
_REQUESTS_FAULT = (400, 413, 422, 431)
_LONGEST = 200
"""Characters of a server's words."""


@dataclass
class Spent:
    """What a decoder's requests have come to so far."""

    requests: int = 0
    """Sent, repetitions not counted."""
    retries: int = 0
    usage: Usage = field(default_factory=Usage)
    """Reused are prompt tokens that the server had cached, where it says."""


class _Attempts(openai.DefaultAsyncHttpxClient):
    """What `openai` sends through: every attempt is seen here, and a reply that can't be read fails as one that did not
    come does."""

    def __init__(self, options: RemoteOptions, spent: Spent, secret: str | None) -> None:
        super().__init__()
        self._options = options
        self._spent = spent
        self._secret = secret
        self._in_trouble = False
        self._well_at = 0.0
        """When the last good reply came, by `time.monotonic`."""

    async def send(self, request: httpx2.Request, **rest: Any) -> httpx2.Response:
        """The reply to one attempt; that to a completion is in `extensions["reply"]`, unless it is a web page."""
        sent_at, before = time.monotonic(), int(request.headers.get(_BEFORE, 0))
        self._spent.retries += before > 0
        try:
            response = await super().send(request, **rest)
            if response.is_success and request.url.path.endswith("/completions") and "html" not in _kind(response):
                response.extensions["reply"] = self._read(request, response)
        except httpx2.RequestError as error:
            self._failed(request, sent_at, plain(str(error), self._secret) or type(error).__name__, before)
            raise
        if response.is_success:
            self._in_trouble, self._well_at = False, time.monotonic()
        elif _is_hopeless(request, response):
            response.headers["x-should-retry"] = "false"
        elif _may_pass(response):
            self._failed(request, sent_at, f"{response.status_code}: {said(response, self._secret)}", before)
        return response

    def _read(self, request: httpx2.Request, response: httpx2.Response) -> Reply:
        try:
            return Reply.model_validate_json(response.content)
        except ValidationError as error:
            first = error.errors(include_input=False, include_url=False)[0]
            place = ".".join(map(str, first["loc"]))
            reason = f"its reply ({_kind(response)}) can't be read: {place}{': ' if place else ''}{first['msg']}"
            raise httpx2.DecodingError(reason, request=request) from None

    def _failed(self, request: httpx2.Request, sent_at: float, why: str, before: int) -> None:
        """Tell of it once an outage, not once a request: what was sent before the last good reply failed in an outage
        that is past."""
        more = request.method == "POST" and before < self._options.retries
        if more and not self._in_trouble and sent_at > self._well_at:
            self._in_trouble = True
            where, times = self._options.base_url, self._options.retries
            log.warning("%s: %s; trying again, up to %d times", where, why, times)


class Server:
    """A server's routes, for use in one event loop."""

    def __init__(self, options: RemoteOptions, model: str) -> None:
        self.options = options
        self.model = model
        self.spent = Spent()
        self._key = key()
        self._client = openai.AsyncOpenAI(
            api_key=self._key or "none",  # the package wants one; servers that need none read none
            base_url=options.base_url,
            max_retries=options.retries,
            timeout=httpx2.Timeout(options.timeout, connect=_CONNECT_SECONDS, pool=None),
            http_client=_Attempts(options, self.spent, self._key),
        )

    def __repr__(self) -> str:
        return f"Server({self.options.base_url!r}, {self.model!r})"

    async def check(self) -> None:
        """Raises ModelError where nothing answers, or the key is refused. What models there are is not asked here:
        some servers list none, or take any name."""
        try:
            await self._get_models()
        except openai.APIConnectionError as error:
            raise ModelError(
                f"the server at {self.options.base_url} does not answer ({self._why(error)}): start it"
            ) from None
        except openai.APIStatusError as error:
            if error.status_code in (401, 403):
                raise self._key_refused(error.status_code) from None

    async def post(self, path: str, body: dict[str, Any]) -> Reply:
        """The reply to a body, sent again as often as the options say.

        Raises RefusedError where the server faults the body, and ModelError where it does not answer, refuses the key
        or has no such model or route.
        """
        self.spent.requests += 1
        try:
            response = await self._client.post(path, body=body, cast_to=httpx2.Response)
        except openai.APIConnectionError as error:
            raise self._unanswered(error, self._why(error)) from None
        except openai.APIStatusError as error:
            raise await self._fault(error, path) from None
        reply: Reply | None = response.extensions.get("reply")
        if reply is None:
            raise ModelError(
                f"{self.options.base_url} replies with a web page: is base_url right? It usually ends in /v1"
            )
        return reply

    async def tokenize(self, body: dict[str, Any]) -> tuple[int, ...]:
        """The tokens that the server's /tokenize makes of a body (vLLM, SGLang); none where it has no such route.

        Raises ModelError where it does not answer.
        """
        address = f"{self.options.base_url.removesuffix('/v1')}/tokenize"
        try:
            response = await self._client.post(address, body={"model": self.model, **body}, cast_to=httpx2.Response)
            return TokenIds.model_validate_json(response.content).tokens
        except openai.APIConnectionError as error:
            raise self._unanswered(error, self._why(error)) from None
        except openai.APIStatusError as error:
            if error.status_code >= 500:
                raise await self._fault(error, "/tokenize") from None
            return ()
        except ValidationError:  # another route of that name
            return ()

    async def close(self) -> None:
        """Let go of all connections."""
        await self._client.close()

    async def _get_models(self) -> list[str]:
        """The names that the server lists, asked once."""
        once: Any = {"max_retries": 0, "timeout": _CONNECT_SECONDS}
        response = await self._client.get("/models", cast_to=httpx2.Response, options=once)
        try:
            return [str(model["id"]) for model in response.json()["data"]]
        except (ValueError, LookupError, TypeError):
            return []

    def _unanswered(self, error: openai.APIConnectionError | openai.APIStatusError, why: str) -> ModelError:
        before = int(error.request.headers.get(_BEFORE, 0))
        times = f", {before + 1} times" if before else ""
        return ModelError(
            f"the server at {self.options.base_url} does not answer ({why}{times}): see to it that it runs, then go on "
            "with --resume"
        )

    def _why(self, error: openai.APIConnectionError) -> str:
        if isinstance(error, openai.APITimeoutError):
            connecting = isinstance(error.__cause__, httpx2.ConnectTimeout)
            return f"no whole reply in {_CONNECT_SECONDS if connecting else self.options.timeout:g} s"
        return plain(str(error.__cause__ or error), self._key) or type(error.__cause__).__name__

    async def _fault(self, error: openai.APIStatusError, path: str) -> TotError:
        """Our error for a status that no repetition helped."""
        status, why = error.status_code, said(error.response, self._key)
        where = f"the server at {self.options.base_url}"
        if status in (401, 403):
            return self._key_refused(status)
        if status == 404 or (status in _REQUESTS_FAULT and self._is_about_model(error.code, why)):
            try:
                models = await self._get_models()
            except openai.OpenAIError:
                models = []
            if self.model not in models:
                known = ", ".join(plain(name, self._key) for name in models[:20]) or "none that it lists"
                return ModelError(
                    f"{where} has no model {self.model!r}, or no {path} ({status}: {why}). Its models: {known}. Give "
                    "served=NAME, and a base_url such as http://host:port/v1"
                )
        if status == 404:
            return ModelError(f"{where} has no {path} (404: {why}): is base_url right? It usually ends in /v1")
        if "logprob_token_ids" in error.request.content.decode() and "index out of range" in why:
            return RefusedError(f"{path} fails for logprob_token_ids", "logprob_token_ids")
        if status in _REQUESTS_FAULT:
            return RefusedError(f"{where} refuses the request ({status}): {why}", why)
        if _may_pass(error.response) and not _is_hopeless(error.request, error.response):
            return self._unanswered(error, f"{status}: {why}")
        return ModelError(f"{where} fails ({status}): {why}")

    def _is_about_model(self, code: str | None, why: str) -> bool:
        unknown = re.search(r"(?i)\bmodel\b.*(not found|does not exist|doesn't exist|unknown)", why)
        return code == "model_not_found" or unknown is not None or f"requested '{self.model}'" in why

    def _key_refused(self, status: int) -> ModelError:
        """Without the server's words, which may repeat the key."""
        what = f"the key in {KEY_VARIABLE}" if self._key else f"a request without a key: set {KEY_VARIABLE}"
        return ModelError(f"the server at {self.options.base_url} refuses ({status}) {what}")


def _may_pass(response: httpx2.Response) -> bool:
    """True for what the package sends again."""
    return response.status_code in (408, 409, 429) or response.status_code >= 500


def _is_hopeless(request: httpx2.Request, response: httpx2.Response) -> bool:
    """True for failures that last, whatever their status: a quota that is used up, and a fault of vLLM's own for
    `logprob_token_ids` where it speculates (0.32)."""
    if response.status_code == 429:
        return b"insufficient_quota" in response.content
    return b"index out of range" in response.content and b"logprob_token_ids" in request.content


def _kind(response: httpx2.Response) -> str:
    return response.headers.get("content-type", "no content type").partition(";")[0]


def said(response: httpx2.Response, secret: str | None) -> str:
    """What a server says went wrong, whatever shape it gives that."""
    try:
        found: Any = json.loads(response.content)
    except (ValueError, RecursionError):
        found = "" if "html" in _kind(response) else response.content.decode("utf-8", "replace")
    for name in ("error", "detail", "message"):
        if isinstance(found, dict) and found.get(name):
            found = found[name]
    return plain(found if isinstance(found, str) else json.dumps(found), secret) or "it does not say why"


def plain(text: str, secret: str | None) -> str:
    """A server's text as an error repeats it."""
    if secret:
        text = text.replace(secret, "…")
    line = " ".join("".join(c if c.isprintable() else " " for c in text[:10_000]).split())
    return line if len(line) <= _LONGEST else line[: _LONGEST - 1] + "…"
