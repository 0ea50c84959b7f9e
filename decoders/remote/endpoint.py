"""Endpoint: one model at one server. Bodies are sent as the server takes them, as many at once as the options say, and
what they take is counted."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any

from tot.decoders.budget import Meter
from tot.decoders.remote.body import Dialect, RefusedError
from tot.decoders.remote.reply import ServerReply
from tot.decoders.request import Usage

if TYPE_CHECKING:
    from tot.decoders.remote.server import Server

log = logging.getLogger(__name__)

_LONG, _MOST_CHARACTERS = 4000, 20
"""Characters of a prompt that is checked for truncation, and the most that a token has on average."""


class SpentError(Exception):
    """The budget has ended."""


class Endpoint:
    """For use in one event loop."""

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
        """The reply to a body, which is fitted to what the server takes, and what it took, which is counted.

        Raises SpentError where the meter's budget is spent, RefusedError or ModelError.
        """
        async with self._slots:
            while True:
                if meter.overspent() is not None:
                    raise SpentError
                if body.get("n", 1) > 1 and not self.dialect.n:
                    raise RefusedError("this server draws one sample a request", "n")
                sent = self._fitted(body)
                limit = meter.budget.seconds
                try:
                    async with asyncio.timeout(None if limit is None else limit - meter.seconds):
                        reply = await self.server.post(path, sent)
                    break
                except TimeoutError:
                    raise SpentError from None
                except RefusedError as error:
                    # Others may have taught it while this one was under way.
                    if not self.dialect.learns(error.said, sent) and self._fitted(body) == sent:
                        raise
        used = self._usage(reply, body)
        meter.count(new_tokens=used.new_tokens)
        self.server.spent.usage += used
        return reply, used

    async def tokenize(self, body: dict[str, Any]) -> tuple[int, ...]:
        async with self._slots:
            return await self.server.tokenize(body)

    def warn(self, message: str, *about: object) -> None:
        """Log a warning, the first time."""
        if message not in self._warned:
            self._warned.add(message)
            log.warning(message, *about)

    def _fitted(self, body: dict[str, Any]) -> dict[str, Any]:
        return {"model": self.model, **self.dialect.fitted(body), **self.options.extra}

    def _usage(self, reply: ServerReply, body: dict[str, Any]) -> Usage:
        """The usage of a reply; nothing is known of one that does not say. Some servers count a token of an echo."""
        if reply.usage is None or reply.usage.completion_tokens is None:
            self.warn("%s does not say how many tokens its replies take: they are not counted", self)
        used = reply.usage
        prompt, new = (used.prompt_tokens or 0, used.completion_tokens or 0) if used is not None else (0, 0)
        characters = _characters(body)
        if characters > _LONG and 0 < prompt * _MOST_CHARACTERS < characters:
            self.warn(
                "%s counts %d prompt tokens in %d characters: it may have truncated the prompt",
                self,
                prompt,
                characters,
            )
        cached = min(prompt, (used.cached_tokens or 0) if used is not None else 0)
        cost = self.options.cost(prompt, cached, new)
        return Usage(prompt, cached, new if body["max_tokens"] else 0, cost=cost)


def _characters(body: dict[str, Any]) -> int:
    """The length of the prompt in a body; 0 for token ids."""
    prompt = body.get("prompt", "")
    texts = [message["content"] for message in body.get("messages", ())]
    return sum(map(len, texts)) + (len(prompt) if isinstance(prompt, str) else 0)
