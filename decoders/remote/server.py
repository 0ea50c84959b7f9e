"""Server: one body sent, one reply read. The `openai` package's client sends, and repeats what may pass; a failure that
remains becomes one of our errors.

A server's words are data: in an error they are one short line, without control characters and without the key.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable
from typing import Any

import httpx2
import openai
from pydantic import ValidationError

from tot.decoders.errors import ModelError, OptionError, TotError
from tot.decoders.remote.body import RefusedError
from tot.decoders.remote.options import KEY_VARIABLE, RemoteOptions, key
from tot.decoders.remote.reply import ServerReply, TokenIds
from tot.decoders.remote.transport import (
    ATTEMPT,
    MAX_WAIT,
    Attempts,
    LastingError,
    RedirectedError,
    Spent,
    failures,
    is_about_the_request,
    is_hopeless,
    may_pass,
    plain,
    said,
    says_why,
    too_long,
)

_CONNECT_SECONDS = 10.0
_REQUESTS_FAULT = (400, 413, 422, 431)
_DEAD_AFTER = 3
"""Requests given up in a row after which the server is at fault, not the requests."""


class Server:
    """A server's routes, for use in one event loop."""

    def __init__(self, options: RemoteOptions, model: str) -> None:
        self.options = options
        self.model = model
        self.spent = Spent()
        self.is_tot = False
        """Whether `tot serve` answers there: `check` finds out."""
        self._key = key()
        self._attempts = Attempts(options, self.spent, self._key)
        self._client = openai.AsyncOpenAI(
            api_key=self._key or "none",  # the package wants one; servers that need none read none
            base_url=options.base_url,
            max_retries=options.retries,
            timeout=httpx2.Timeout(options.timeout, connect=_CONNECT_SECONDS, pool=None),
            http_client=self._attempts,
        )

    def __repr__(self) -> str:
        return f"Server({self.options.base_url!r}, {self.model!r})"

    async def check(self) -> None:
        """Raises ModelError where nothing answers, or the key is refused. What models there are is not asked here:
        some servers list none, or take any name."""
        try:
            models = await self._get_models()
            # The name alone may be a folder's: transformers takes a model's folder for its owner.
            served = [str(model.get("id")) for model in models if model.get("owned_by") == "tot"]
            self.is_tot = any(name.endswith(":ar") for name in served)
        except openai.APIConnectionError as error:
            raise ModelError(
                f"the server at {self.options.base_url} does not answer ({self._why(error)}): start it"
            ) from None
        except openai.APIStatusError as error:
            if error.status_code in (401, 403):
                raise self._key_refused(error.status_code) from None

    async def post(self, path: str, body: dict[str, Any]) -> ServerReply:
        """The reply to a body, sent again as often as the options say.

        Raises RefusedError where the server faults the body or fails at it alone, and ModelError where it does not
        answer, refuses the key or has no such model or route.
        """
        self.spent.requests += 1
        failures.set([])
        try:
            response = await self._sent(self._client.post(path, body=body, cast_to=httpx2.Response))
        except RedirectedError as error:
            raise ModelError(
                f"{self.options.base_url} is not the server's address: {error}; give that base_url"
            ) from None
        except LastingError as error:
            raise self._given_up(str(error), body) from None
        except openai.APIConnectionError as error:
            raise self._unanswered(error, self._why(error)) from None
        except openai.APIStatusError as error:
            raise await self._fault(error, path, body) from None
        reply: ServerReply | None = response.extensions.get("reply")
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
            post = self._client.post(address, body={"model": self.model, **body}, cast_to=httpx2.Response)
            response = await self._sent(post)
            return TokenIds.model_validate_json(response.content).tokens
        except openai.APIConnectionError as error:
            raise self._unanswered(error, self._why(error)) from None
        except openai.APIStatusError as error:
            if error.status_code >= 500 and not is_about_the_request(error.response):
                raise await self._fault(error, "/tokenize", body) from None
            return ()
        except (ValidationError, RedirectedError):  # another route of that name
            return ()

    async def close(self) -> None:
        """Let go of all connections."""
        await self._client.close()

    async def _sent(self, attempts: Awaitable[httpx2.Response]) -> httpx2.Response:
        """Return the response. Raises OptionError for a header that cannot be sent, without its value, which may be a
        secret; the key has been checked before."""
        problem = OptionError(
            "a header for the server cannot be sent: correct OPENAI_ORG_ID, OPENAI_PROJECT_ID or OPENAI_CUSTOM_HEADERS"
        )
        try:
            return await attempts
        except UnicodeEncodeError:
            raise problem from None
        except openai.APIConnectionError as error:
            if isinstance(error.__cause__, httpx2.LocalProtocolError):
                raise problem from None
            raise

    async def _get_models(self) -> list[dict[str, Any]]:
        """The models that the server lists, asked once."""
        once: Any = {"max_retries": 0, "timeout": _CONNECT_SECONDS}
        response = await self._sent(self._client.get("/models", cast_to=httpx2.Response, options=once))
        try:
            return [model for model in response.json()["data"] if isinstance(model, dict) and "id" in model]
        except (ValueError, LookupError, TypeError, RecursionError):
            return []

    def _unanswered(self, error: openai.APIConnectionError | openai.APIStatusError, why: str) -> ModelError:
        before = int(error.request.headers.get(ATTEMPT, 0))
        times = f", {before + 1} times" if before else ""
        return ModelError(
            f"the server at {self.options.base_url} does not answer ({why}{times}): see to it that it runs, then go on "
            "with --resume"
        )

    def _given_up(self, why: str, body: dict[str, Any]) -> TotError:
        """The error for a request that the server always fails at: its own fault, unless others fail alike. One for
        several samples is asked again for one."""
        self._attempts.failed_in_a_row += body.get("n", 1) == 1
        times, where = len(failures.get()), f"the server at {self.options.base_url}"
        counted = f"{why}, {times} times" if times > 1 else why
        if self._attempts.failed_in_a_row >= _DEAD_AFTER:
            return ModelError(
                f"{where} fails at every request ({counted}): see to it that it runs, then go on with --resume"
            )
        return RefusedError(f"{where} fails at this request ({counted})", why)

    def _why(self, error: openai.APIConnectionError) -> str:
        if isinstance(error, openai.APITimeoutError):
            connecting = isinstance(error.__cause__, httpx2.ConnectTimeout)
            return f"no whole reply in {_CONNECT_SECONDS if connecting else self.options.timeout:g} s"
        return plain(str(error.__cause__ or error), self._key) or type(error.__cause__).__name__

    async def _fault(self, error: openai.APIStatusError, path: str, body: dict[str, Any]) -> TotError:
        """Our error for a status that no repetition helped."""
        status, why = error.status_code, said(error.response, self._key)
        where = f"the server at {self.options.base_url}"
        if status in (401, 403):
            return self._key_refused(status)
        if status == 404 or (status in _REQUESTS_FAULT and self._is_about_model(error.code, why)):
            try:
                models = [str(model["id"]) for model in await self._get_models()]
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
        if status in _REQUESTS_FAULT or is_about_the_request(error.response):
            return RefusedError(f"{where} refuses the request ({status}): {why}", why)
        if wait := too_long(error.response):
            return self._unanswered(
                error, f"{status}: {why}; it asks to be left alone for {wait}, and at most {MAX_WAIT:g} s are waited"
            )
        if says_why(error.response):
            return self._given_up(f"{status}: {why}", body)
        if may_pass(error.response) and not is_hopeless(error.request, error.response):
            return self._unanswered(error, f"{status}: {why}")
        return ModelError(f"{where} fails ({status}): {why}")

    def _is_about_model(self, code: str | None, why: str) -> bool:
        unknown = re.search(r"(?i)\bmodel\b.*(not found|does not exist|doesn't exist|unknown)", why)
        return code == "model_not_found" or unknown is not None or f"requested '{self.model}'" in why

    def _key_refused(self, status: int) -> ModelError:
        """Without the server's words, which may repeat the key."""
        what = f"the key in {KEY_VARIABLE}" if self._key else f"a request without a key: set {KEY_VARIABLE}"
        return ModelError(f"the server at {self.options.base_url} refuses ({status}) {what}")
