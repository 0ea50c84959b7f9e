"""Send one body to a server and read one reply, with the client of the `openai` package.

The client retries temporary failures. Other failures become errors of this project. They quote the server's message as
one short line, without control characters and without the API key.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable
from typing import Any

import httpx2
import openai
from pydantic import ValidationError

from tot.decoders.errors import OptionError, ServerError, TotError
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
    retry_after,
    said,
    says_why,
)

_CONNECT_SECONDS = 10.0
_REJECTIONS = (400, 413, 422, 431)
_PASSED_ON = (429, 503, 504)
"""Statuses that a proxy passes on to its client; others become a 502."""
_MAX_FAILURES = 3
"""Consecutive failed requests after which the server is reported as failing, not the request."""


class Server:
    """The routes of one server, for use in one event loop."""

    def __init__(self, options: RemoteOptions, model: str) -> None:
        self.options = options
        self.model = model
        self.spent = Spent()
        self.is_tot = False
        """True if the server is `tot serve`; set by `check`."""
        self.models: list[str] = []
        """The models that the server lists; set by `check`."""
        self._key = key()
        self._attempts = Attempts(options, self.spent, self._key)
        self._client = openai.AsyncOpenAI(
            api_key=self._key or "none",  # the package requires one
            base_url=options.base_url,
            max_retries=options.retries,
            timeout=httpx2.Timeout(options.timeout, connect=_CONNECT_SECONDS, pool=None),
            http_client=self._attempts,
        )

    def __repr__(self) -> str:
        return f"Server({self.options.base_url!r}, {self.model!r})"

    async def check(self) -> None:
        """Raise ServerError if the server does not answer or rejects the API key.

        The model's name is not checked: some servers list no models, or accept any name.
        """
        try:
            models = await self._get_models()
            self.models = [plain(str(model["id"]), self._key) for model in models]
            self.is_tot = any("decoder" in tot for model in models if isinstance(tot := model.get("tot"), dict))
        except openai.APIConnectionError as error:
            raise ServerError(
                f"the server at {self.options.base_url} does not answer ({self._cause(error)}): start it"
            ) from None
        except LastingError as error:
            raise ServerError(f"the server at {self.options.base_url} lists no models: {error}") from None
        except openai.APIStatusError as error:
            if error.status_code in (401, 403):
                raise self._key_refused(error.status_code) from None

    async def post(self, path: str, body: dict[str, Any]) -> ServerReply:
        """Send a body, with the retries of the options, and return the reply.

        Raises:
            RefusedError: The server rejects the body, or fails only for this body.
            ServerError: The server does not answer, rejects the API key, or does not have the model or the route.
        """
        self.spent.requests += 1
        failures.set([])
        try:
            response = await self._sent(self._client.post(path, body=body, cast_to=httpx2.Response))
        except RedirectedError as error:
            raise ServerError(
                f"{self.options.base_url} is not the server's address: {error}; set base_url to that address"
            ) from None
        except LastingError as error:
            raise self._given_up(str(error), body) from None
        except openai.APIConnectionError as error:
            raise self._unanswered(error, self._cause(error)) from None
        except openai.APIStatusError as error:
            raise await self._fault(error, path, body) from None
        reply: ServerReply | None = response.extensions.get("reply")
        if reply is None:
            raise ServerError(
                f"{self.options.base_url} replies with a web page: check base_url, which usually ends in /v1"
            )
        return reply

    async def tokenize(self, body: dict[str, Any]) -> tuple[int, ...]:
        """Return the token ids of a body by the server's /tokenize (vLLM, SGLang); empty if it has no such route.

        Raises ServerError if the server does not answer.
        """
        address = f"{self.options.base_url.removesuffix('/v1')}/tokenize"
        try:
            post = self._client.post(address, body={"model": self.model, **body}, cast_to=httpx2.Response)
            response = await self._sent(post)
            return TokenIds.model_validate_json(response.content).tokens
        except openai.APIConnectionError as error:
            raise self._unanswered(error, self._cause(error)) from None
        except openai.APIStatusError as error:
            if error.status_code >= 500 and not is_about_the_request(error.response):
                raise await self._fault(error, "/tokenize", body) from None
            return ()
        except (ValidationError, LastingError, RedirectedError):  # a different route with the same name
            return ()

    async def errors_have_a_status(self) -> bool | None:
        """Return whether a request to an unknown path gets an error's status; None if its reply is not an error."""
        try:
            return False if b'"error"' in (await self._got("/tot-unknown-path")).content else None
        except (openai.OpenAIError, RedirectedError) as error:
            return isinstance(error, openai.APIStatusError) or None

    async def close(self) -> None:
        """Close all connections."""
        await self._client.close()

    async def _sent(self, attempts: Awaitable[httpx2.Response]) -> httpx2.Response:
        """Return the response.

        Raises OptionError for an invalid header, without its value, which may be secret. The key is already checked.
        """
        problem = OptionError(
            "a request header is invalid: correct OPENAI_ORG_ID, OPENAI_PROJECT_ID or OPENAI_CUSTOM_HEADERS"
        )
        try:
            return await attempts
        except UnicodeEncodeError:
            raise problem from None
        except openai.APIConnectionError as error:
            if isinstance(error.__cause__, httpx2.LocalProtocolError):
                raise problem from None
            raise

    async def _got(self, path: str) -> httpx2.Response:
        """Return the response to a GET, without retries."""
        no_retries: Any = {"max_retries": 0, "timeout": _CONNECT_SECONDS}
        return await self._sent(self._client.get(path, cast_to=httpx2.Response, options=no_retries))

    async def _get_models(self) -> list[dict[str, Any]]:
        """Return the models that the server lists."""
        response = await self._got("/models")
        try:
            return [model for model in response.json()["data"] if isinstance(model, dict) and "id" in model]
        except (ValueError, LookupError, TypeError, RecursionError):
            return []

    def _unanswered(self, error: openai.APIConnectionError | openai.APIStatusError, why: str) -> ServerError:
        retries = int(error.request.headers.get(ATTEMPT, 0))
        times = f", {retries + 1} times" if retries else ""
        message = (
            f"the server at {self.options.base_url} does not answer ({why}{times}): start or restart it, then resume "
            "with --resume"
        )
        if isinstance(error, openai.APIStatusError):
            return self._failing(message, error)
        return ServerError(message, status=504 if isinstance(error, openai.APITimeoutError) else 502)

    def _failing(self, message: str, error: openai.APIStatusError) -> ServerError:
        """Return the error for a status, with the status and the Retry-After for clients of a proxy."""
        status = {529: 503}.get(error.status_code, error.status_code)
        wait = retry_after(error.response) or None
        return ServerError(message, said(error.response, self._key), status if status in _PASSED_ON else 502, wait)

    def _given_up(self, why: str, body: dict[str, Any]) -> TotError:
        """Return the error for a request that fails in every attempt: RefusedError, or ServerError if others fail too.

        Only requests for one sample count, as a request for several is repeated as requests for one.
        """
        self._attempts.failed_in_a_row += body.get("n", 1) == 1
        times, where = len(failures.get()), f"the server at {self.options.base_url}"
        counted = f"{why}, {times} times" if times > 1 else why
        if self._attempts.failed_in_a_row >= _MAX_FAILURES:
            message = f"{where} fails for every request ({counted}): restart it, then resume with --resume"
            return ServerError(message, why)
        return RefusedError(f"{where} fails for this request ({counted})", why, 502)

    def _cause(self, error: openai.APIConnectionError) -> str:
        if isinstance(error, openai.APITimeoutError):
            connecting = isinstance(error.__cause__, httpx2.ConnectTimeout)
            return f"no complete reply in {_CONNECT_SECONDS if connecting else self.options.timeout:g} s"
        return plain(str(error.__cause__ or error), self._key) or type(error.__cause__).__name__

    async def _fault(self, error: openai.APIStatusError, path: str, body: dict[str, Any]) -> TotError:
        """Return the error for a status that remains after all retries."""
        status, why = error.status_code, said(error.response, self._key)
        where = f"the server at {self.options.base_url}"
        if status in (401, 403):
            return self._key_refused(status)
        if status == 404 or (status in _REJECTIONS and self._is_about_model(error.code, why)):
            try:
                models = [str(model["id"]) for model in await self._get_models()]
            except openai.OpenAIError:
                models = []
            if self.model not in models:
                known = ", ".join(plain(name, self._key) for name in models[:20]) or "none listed"
                return ServerError(
                    f"{where} has no model {self.model!r}, or no {path} ({status}: {why}). Its models: {known}. Give "
                    "served=NAME, and a base_url such as http://host:port/v1"
                )
        if status == 404:
            return ServerError(f"{where} has no {path} (404: {why}): check base_url, which usually ends in /v1")
        if "logprob_token_ids" in error.request.content.decode() and "index out of range" in why:
            return RefusedError(f"{path} fails for logprob_token_ids", "logprob_token_ids")
        if status in _REJECTIONS or is_about_the_request(error.response):
            return RefusedError(f"{where} rejects the request ({status}): {why}", why)
        if (wait := retry_after(error.response)) > MAX_WAIT:
            return self._unanswered(
                error, f"{status}: {why}; its Retry-After is {wait} s, longer than the maximum of {MAX_WAIT:g} s"
            )
        if says_why(error.response):
            return self._given_up(f"{status}: {why}", body)
        if may_pass(error.response) and not is_hopeless(error.request, error.response):
            return self._unanswered(error, f"{status}: {why}")
        return self._failing(f"{where} fails ({status}): {why}", error)

    def _is_about_model(self, code: str | None, why: str) -> bool:
        unknown = re.search(r"(?i)\bmodel\b.*(not found|does not exist|doesn't exist|unknown)", why)
        return code == "model_not_found" or unknown is not None or f"requested '{self.model}'" in why

    def _key_refused(self, status: int) -> ServerError:
        """Return the error, without the server's message, which may contain the API key."""
        cause = f"the key in {KEY_VARIABLE}" if self._key else f"a request without a key: set {KEY_VARIABLE}"
        return ServerError(f"the server at {self.options.base_url} rejects ({status}) {cause}")
