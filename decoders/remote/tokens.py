"""ServerTokens: prompts and choices as the token ids that a server makes of them, by its /tokenize (vLLM, SGLang).

The template is the server's; what a choice is as a continuation is what a local decoder makes of it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from tot.decoders.errors import RequestError
from tot.decoders.remote.body import Prompt, joined, messages_of
from tot.decoders.remote.options import RemoteOptions
from tot.decoders.remote.wire import TokenIds
from tot.decoders.request import Message


class CannotError(Exception):
    """This server can't do it: another way has to be found."""


class ServerTokens:
    """Choices are tokenized once."""

    def __init__(self, options: RemoteOptions, tokenize: Callable[[dict[str, Any]], Awaitable[TokenIds]]) -> None:
        """`tokenize` sends a body, and raises RequestError where the server has no such route."""
        self._options = options
        self._tokenize = tokenize
        self._choices: dict[str, list[int]] = {}
        self._end: int | None = None
        self._asking = asyncio.Lock()
        """So that the requests of a level, which come together, ask once."""

    async def of_prompt(self, prompt: Prompt) -> list[int]:
        """With the template for messages, and whatever the server puts before any text."""
        messages = messages_of(prompt)
        if isinstance(prompt, tuple) and not messages:
            return [part for part in prompt if isinstance(part, int)]
        if isinstance(prompt, str) or self._options.api == "completions":
            return await self._ask(prompt=prompt if isinstance(prompt, str) else joined(messages))
        return await self._of_chat(messages, messages[-1].role == "assistant")

    async def of_choice(self, choice: str) -> list[int]:
        """As a continuation: after a line break, for tokenizers that begin every text with a space."""
        async with self._asking:
            if choice not in self._choices:
                line = await self._ask(prompt="\n", add_special_tokens=False)
                whole = await self._ask(prompt="\n" + choice, add_special_tokens=False)
                if whole[: len(line)] != line:
                    whole, line = await self._ask(prompt=choice, add_special_tokens=False), []
                self._choices[choice] = whole[len(line) :]
            return self._choices[choice]

    async def end_of_turn(self) -> int:
        """The token that the template puts after what an assistant said."""
        async with self._asking:
            if self._end is None:
                said = (Message(role="user", content="x"), Message(role="assistant", content="x"))
                opened = await self._of_chat(said, True)
                closed = await self._of_chat(said, False, replies=False)
                if closed[: len(opened)] != opened or len(closed) == len(opened):
                    raise CannotError
                self._end = closed[len(opened)]
            return self._end

    async def _of_chat(self, messages: Sequence[Message], goes_on: bool, replies: bool = True) -> list[int]:
        template = {name: value for name, value in self._options.extra.items() if name == "chat_template_kwargs"}
        return await self._ask(
            messages=[{"role": message.role, "content": message.content} for message in messages],
            add_generation_prompt=replies and not goes_on,
            continue_final_message=goes_on,
            **template,
        )

    async def _ask(self, **body: Any) -> list[int]:
        try:
            ids = list((await self._tokenize(body)).tokens)
        except RequestError:
            raise CannotError from None
        if not ids:  # another server's route of that name
            raise CannotError
        return ids
