"""One model on one server: adapts bodies to the server, limits concurrency and counts the usage of each reply."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any

from tot.decoders.budget import Meter
from tot.decoders.remote.body import Dialect, RefusedError
from tot.decoders.remote.reply import ServerReply, apart
from tot.decoders.request import Usage

if TYPE_CHECKING:
    from tot.decoders.remote.abilities import Abilities
    from tot.decoders.remote.server import Server

log = logging.getLogger(__name__)

_LONG_PROMPT, _MAX_CHARACTERS_PER_TOKEN = 4000, 20
"""Prompts above this length (characters) are checked for truncation, by this bound on the average token length."""

_LONGEST_TOKEN = 200
"""Characters of a new token; a text with more of them ignores `max_tokens`, and reading it could take minutes."""


class SpentError(Exception):
    """The budget is spent."""


class Endpoint:
    """One model on one server, for use in one event loop."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self.options = server.options
        self.model = server.model
        self.dialect = Dialect()
        self._slots = asyncio.Semaphore(self.options.concurrency)
        self._warned: set[str] = set()

    def __repr__(self) -> str:
        return f"{self.model!r} at {self.options.base_url}"

    async def ask(self, meter: Meter, path: str, body: dict[str, Any]) -> tuple[ServerReply, Usage]:
        """Send a body, adapted to the server, and return the reply and its usage, which `meter` counts.

        Raises SpentError if the meter's budget is spent, RefusedError or ModelError.
        """
        async with self._slots:
            while True:
                if meter.overspent() is not None:
                    raise SpentError
                if body.get("n", 1) > 1 and not self.dialect.n:
                    raise RefusedError("this server returns one sample per request", "n")
                fitted = self._fitted(body)
                limit = meter.budget.seconds
                try:
                    async with asyncio.timeout(None if limit is None else limit - meter.seconds):
                        reply = await self.server.post(path, fitted)
                    break
                except TimeoutError:
                    raise SpentError from None
                except RefusedError as error:
                    # A concurrent request may have changed the dialect.
                    if self.dialect.learns(error.said, fitted) or self._fitted(body) != fitted:
                        continue
                    if self.options.logprobs and "logprob" in error.said:
                        raise RefusedError(
                            f"{error}: remove the option logprobs, or use another server", error.said
                        ) from None
                    raise
        longest = max(sum(map(len, apart(choice))) for choice in reply.choices)
        if longest > _LONGEST_TOKEN * (body["max_tokens"] + 1) and not body.get("echo"):
            said = f"a text has {longest:,} characters, and max_tokens is {body['max_tokens']:,}"
            raise RefusedError(f"{self} ignores a limit: {said}; use another server", said, 502)
        usage = self._usage(reply, body)
        meter.count(new_tokens=usage.new_tokens)
        self.server.spent.usage += usage
        return reply, usage

    def adapt(self, abilities: Abilities) -> None:
        """Work around the abilities that the server lacks, or warn of them."""
        self.dialect.n &= abilities.get("n") is not False
        if abilities.get("seed") is False and self.dialect.seeded:
            self.warn("%s ignores the seed: its samples are not reproducible", self)
        if abilities.get("parallel") is False and "concurrency" not in self.options.model_fields_set:
            self._slots = asyncio.Semaphore(1)
            log.info("%s runs one request at a time: requests are sent one by one", self)

    async def tokenize(self, body: dict[str, Any]) -> tuple[int, ...]:
        async with self._slots:
            return await self.server.tokenize(body)

    def warn(self, message: str, *about: object) -> None:
        """Log a warning once per message."""
        if message not in self._warned:
            self._warned.add(message)
            log.warning(message, *about)

    def _fitted(self, body: dict[str, Any]) -> dict[str, Any]:
        return {"model": self.model, **self.dialect.fitted(body), **self.options.extra}

    def _usage(self, reply: ServerReply, body: dict[str, Any]) -> Usage:
        """Return the usage of a reply; 0 for counts that the server does not report.

        New tokens of a request with `max_tokens` 0, an echo, count as 0: some servers report 1.
        """
        if reply.usage is None or reply.usage.completion_tokens is None:
            self.warn("%s does not report the number of new tokens: a budget estimates them from the texts", self)
        tokens = reply.usage
        prompt, new = (tokens.prompt_tokens or 0, tokens.completion_tokens or 0) if tokens is not None else (0, 0)
        characters = _characters(body)
        if characters > _LONG_PROMPT and 0 < prompt * _MAX_CHARACTERS_PER_TOKEN < characters:
            self.warn(
                "%s counts %d prompt tokens in %d characters: it may have truncated the prompt",
                self,
                prompt,
                characters,
            )
        cached = min(prompt, (tokens.cached_tokens or 0) if tokens is not None else 0)
        cost = self.options.cost(prompt, cached, new)
        return Usage(prompt, cached, new if body["max_tokens"] else 0, cost=cost)


def _characters(body: dict[str, Any]) -> int:
    """Return the length of the prompt in a body in characters; 0 for token ids."""
    prompt = body.get("prompt", "")
    texts = [message["content"] for message in body.get("messages", ())]
    return sum(map(len, texts)) + (len(prompt) if isinstance(prompt, str) else 0)
