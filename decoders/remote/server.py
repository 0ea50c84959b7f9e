"""Server: one body sent, one reply read, repeated while that may help; what can't be helped becomes one of our errors.

The `openai` package's client sends, tenacity repeats. No text of the server's gets into an error with the key in it.
"""

from __future__ import annotations

import asyncio
import logging
import random
import re
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from pydantic import BaseModel, ValidationError

from tot.decoders.errors import ModelError, OptionError, TotError
from tot.decoders.remote.faults import PASSING, REQUESTS_FAULT, PassingError, RefusedError, asked_to_wait, plain, said
from tot.decoders.remote.options import KEY_VARIABLE, RemoteOptions, key
from tot.decoders.remote.wire import ModelNames
from tot.decoders.request import Usage

if TYPE_CHECKING:
    import httpx2
    from openai import APIStatusError, AsyncOpenAI
    from tenacity import RetryCallState

log = logging.getLogger(__name__)
_Wanted = TypeVar("_Wanted", bound=BaseModel)

_CONNECT_SECONDS = 10.0


@dataclass
class Spent:
    """What a decoder's requests have come to so far."""

    requests: int = 0
    """Sent, repetitions not counted."""
    retries: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    """Prompt tokens that the server had cached, where it says."""
    new_tokens: int = 0
    cost: float = 0.0
    """In the currency of the prices given."""

    def add(self, used: Usage) -> None:
        """Count what a reply took."""
        self.prompt_tokens += used.prompt_tokens
        self.cached_tokens += used.reused_prompt_tokens
        self.new_tokens += used.new_tokens
        self.cost += used.cost


class Server:
    """A server's routes, for use in one event loop."""

    def __init__(self, options: RemoteOptions, model: str) -> None:
        """Raises OptionError where the packages that it takes are not there."""
        try:
            import openai
            import tenacity
        except ImportError:
            raise OptionError("the openai decoder needs two packages more: pip install 'tot[openai]'") from None
        self._openai, self._tenacity = openai, tenacity
        self.options = options
        self.model = model
        self.spent = Spent()
        self._key = key()
        self._client: AsyncOpenAI | None = None
        self._in_trouble = False
        self._well_at = 0.0
        """When the last good reply came, by `time.monotonic`."""

    def __repr__(self) -> str:
        return f"Server({self.options.base_url!r}, {self.model!r})"

    # -- what is asked of it ----------------------------------------------------------------------------------------

    async def check(self) -> None:
        """Raises ModelError where nothing answers, or the key is refused. What models there are is not asked here:
        some servers list none, or take any name."""
        try:
            await self._send("GET", "/models", None, _CONNECT_SECONDS)
        except PassingError as error:
            if error.refused:
                raise ModelError(f"the server at {self.options.base_url} does not answer ({error}): start it") from None
        except self._openai.APIStatusError as error:
            if error.status_code in (401, 403):
                raise self._key_refused(error.status_code) from None

    async def post(self, path: str, body: dict[str, Any], wanted: type[_Wanted], optional: bool = False) -> _Wanted:
        """The reply to a body, sent again as often as the options say. `path` may be a whole address; an `optional`
        route is one that a server may not have.

        Raises RefusedError where the server faults the body or has no optional route, and ModelError where it does not
        answer, refuses the key or has no such model or route.
        """
        self.spent.requests += 1
        retrying = self._tenacity.AsyncRetrying(
            stop=self._tenacity.stop_after_attempt(self.options.retries + 1),
            retry=self._tenacity.retry_if_exception_type(PassingError),
            wait=self._wait,
            before_sleep=self._before_repetition,
            reraise=True,
        )
        try:
            reply: _Wanted = await retrying(self._once, path, body, wanted, optional)
        except PassingError as error:
            times = f", {self.options.retries + 1} times" if self.options.retries else ""
            raise ModelError(
                f"the server at {self.options.base_url} does not answer ({error}{times}): see to it that it runs, then "
                "go on with --resume"
            ) from None
        except self._openai.APIStatusError as error:
            if optional and error.status_code < 500:
                raise RefusedError(f"the server has no {path}", self._said(error)) from None
            raise await self._fault(error, path) from None
        self._in_trouble, self._well_at = False, time.monotonic()
        return reply

    async def close(self) -> None:
        """Let go of all connections."""
        client, self._client = self._client, None
        if client is not None:
            await client.close()

    # -- one attempt ------------------------------------------------------------------------------------------------

    async def _once(self, path: str, body: dict[str, Any], wanted: type[_Wanted], optional: bool) -> _Wanted:
        sent_at = time.monotonic()
        try:
            return await self._read(path, body, wanted, optional)
        except PassingError as error:
            error.sent_at = sent_at
            raise

    async def _read(self, path: str, body: dict[str, Any], wanted: type[_Wanted], optional: bool) -> _Wanted:
        response = await self._send("POST", path, body, self.options.timeout)
        try:
            return wanted.model_validate_json(response.content)
        except ValidationError as error:
            first = error.errors(include_input=False, include_url=False)[0]
            kind = response.headers.get("content-type", "no content type").partition(";")[0]
            if optional and (first["type"] != "json_invalid" or "html" in kind):
                raise RefusedError(f"{path} is another route here", "") from None
            if "html" in kind:
                raise ModelError(
                    f"{self.options.base_url} replies with a web page: is base_url right? It usually ends in /v1"
                ) from None
            place = ".".join(map(str, first["loc"]))
            reason = f"its reply ({plain(kind, self._key)}) can't be read: {place}{': ' if place else ''}{first['msg']}"
            raise PassingError(reason) from None

    async def _send(self, method: str, path: str, body: dict[str, Any] | None, seconds: float) -> httpx2.Response:
        """A reply of status 2xx. Raises PassingError or the package's APIStatusError."""
        import httpx2

        client = self._opened()
        try:
            async with asyncio.timeout(seconds):
                if method == "GET":
                    return await client.get(path, cast_to=httpx2.Response)
                return await client.post(path, body=body, cast_to=httpx2.Response)
        except self._openai.APITimeoutError as error:
            connecting = isinstance(error.__cause__, httpx2.ConnectTimeout)
            raise PassingError(_slow(_CONNECT_SECONDS if connecting else seconds), refused=connecting) from None
        except TimeoutError:
            raise PassingError(_slow(seconds)) from None
        except self._openai.APIConnectionError as error:
            cause = error.__cause__ or error
            reason = plain(str(cause), self._key) or type(cause).__name__
            raise PassingError(reason, refused=isinstance(cause, httpx2.ConnectError)) from None
        except self._openai.APIStatusError as error:
            if error.status_code not in PASSING or error.code == "insufficient_quota":
                raise
            if "logprob_token_ids" in (body or {}) and "index out of range" in self._said(error):
                # vLLM, where it speculates (0.32): a fault of its own, each time.
                raise RefusedError(f"{path} fails for logprob_token_ids", "logprob_token_ids") from None
            reason = ": ".join(filter(None, (str(error.status_code), self._said(error))))
            raise PassingError(reason, asked_to_wait(error.response.headers)) from None

    def _opened(self) -> AsyncOpenAI:
        if self._client is None:
            self._client = self._openai.AsyncOpenAI(
                api_key=self._key or "none",  # the package wants one; servers that need none read none
                base_url=self.options.base_url,
                timeout=self._openai.Timeout(self.options.timeout, connect=_CONNECT_SECONDS, pool=None),
                max_retries=0,
            )
        return self._client

    # -- repetitions ------------------------------------------------------------------------------------------------

    def _wait(self, state: RetryCallState) -> float:
        """Seconds before the next attempt: as long as the server asks, or else twice as long as the last time."""
        backoff, asked = self.options.backoff, _asked(state)
        wait = min(backoff * 2.0 ** (state.attempt_number - 1), self.options.longest_wait) if asked is None else asked
        return wait + random.uniform(0, backoff)

    async def _before_repetition(self, state: RetryCallState) -> None:
        asked, error = _asked(state), state.outcome and state.outcome.exception()
        if asked is not None and asked > self.options.longest_wait:
            raise ModelError(
                f"the server at {self.options.base_url} asks to be left alone for {asked:.0f} s ({error}): go on with "
                "--resume after that, or raise longest_wait"
            )
        self.spent.retries += 1
        # Once an outage, not once a request: what was sent before the last good reply failed in an outage that is past.
        if not self._in_trouble and isinstance(error, PassingError) and error.sent_at > self._well_at:
            self._in_trouble = True
            log.warning("%s: %s; trying again, up to %d times", self.options.base_url, error, self.options.retries)

    # -- what went wrong --------------------------------------------------------------------------------------------

    async def _fault(self, error: APIStatusError, path: str) -> TotError:
        """Our error for a status that no repetition helps."""
        status, why = error.status_code, self._said(error) or "it does not say why"
        where = f"the server at {self.options.base_url}"
        if status in (401, 403):
            return self._key_refused(status)
        if status == 404 or (status in REQUESTS_FAULT and self._is_about_model(error.code, why)):
            models = await self._models()
            if models is None or self.model not in models:
                known = ", ".join(plain(name, self._key) for name in models[:20]) if models else "none that it lists"
                return ModelError(
                    f"{where} has no model {self.model!r}, or no {path} ({status}: {why}). Its models: {known}. Give "
                    "served=NAME, and a base_url such as http://host:port/v1"
                )
        if status == 404:
            return ModelError(f"{where} has no {path} (404: {why}): is base_url right? It usually ends in /v1")
        if status in REQUESTS_FAULT:
            return RefusedError(f"{where} refuses the request ({status}): {why}", why)
        return ModelError(f"{where} fails ({status}): {why}")

    def _is_about_model(self, code: str | None, why: str) -> bool:
        unknown = re.search(r"(?i)\bmodel\b.*(not found|does not exist|doesn't exist|unknown)", why)
        return code == "model_not_found" or unknown is not None or f"requested '{self.model}'" in why

    async def _models(self) -> list[str] | None:
        """The names the server lists; None where it has no list."""
        try:
            response = await self._send("GET", "/models", None, _CONNECT_SECONDS)
            return [model.id for model in ModelNames.model_validate_json(response.content).data]
        except (PassingError, ValidationError, self._openai.OpenAIError):
            return None

    def _key_refused(self, status: int) -> ModelError:
        """Without the server's words, which may repeat the key."""
        what = f"the key in {KEY_VARIABLE}" if self._key else f"a request without a key: set {KEY_VARIABLE}"
        return ModelError(f"the server at {self.options.base_url} refuses ({status}) {what}")

    def _said(self, error: APIStatusError) -> str:
        return said(error.response.content, error.response.headers.get("content-type", ""), self._key)


def _asked(state: RetryCallState) -> float | None:
    """The seconds that the server asked for when it failed."""
    error = state.outcome.exception() if state.outcome is not None else None
    return error.wait if isinstance(error, PassingError) else None


def _slow(seconds: float) -> str:
    return f"no whole reply in {seconds:g} s"
