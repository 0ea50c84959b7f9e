"""Score choices on a server: their logprobs as continuations of a prompt, by the most exact way that it supports.

next    Tokenize on the server (/tokenize), then request the logprobs of the choices' tokens, position by position
        (`logprob_token_ids`: vLLM). The server reuses the keys and values of the prompt.
echo    Send the prompt with each choice appended, and read the echoed logprobs (vLLM, SGLang). This is as exact, but
        the server computes the prompt again for each choice.
server  Send the choices to the server, which scores them (`tot serve`).
text    Generate greedily and match the text against the choices: an approximation, for all other servers.

The first three give the scores of a local decoder.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any

from tot.decoders.errors import RefusedError
from tot.decoders.remote.body import COMPLETIONS, Prompt, address, joined, messages_of
from tot.decoders.remote.loop import together
from tot.decoders.remote.reply import Logprobs, ServerReply
from tot.decoders.remote.sampler import Sampler
from tot.decoders.remote.samples import no_text
from tot.decoders.request import ChoiceLogprob, Message, Request

IMPOSSIBLE = -100.0
"""Logprob (nats) of a choice that the generated text does not name."""
_MAX_REPLY_TOKENS = 24
"""Maximum tokens of a reply that names a choice."""

Scores = tuple[ChoiceLogprob, ...]
Ask = Callable[[str, dict[str, Any]], Awaitable[ServerReply]]
"""Sends a body to a path. Raises RefusedError, ModelError, or an exception that ends all scoring."""


class CannotError(Exception):
    """The server does not support this way of scoring."""


class ServerTokens:
    """Prompts and choices as token ids, by the server's tokenizer and chat template.

    A choice gets the same tokens as a continuation that it gets in a local decoder.
    """

    def __init__(self, sampler: Sampler) -> None:
        self._sampler = sampler
        self._choices: dict[str, list[int]] = {}
        self._end: int | None = None
        self._lock = asyncio.Lock()
        """Makes concurrent requests share one tokenization."""

    async def of_prompt(self, prompt: Prompt) -> list[int]:
        """Tokenize a prompt: with the chat template for messages, and with the server's special tokens."""
        messages = messages_of(prompt)
        if isinstance(prompt, tuple) and not messages:
            return [part for part in prompt if isinstance(part, int)]
        if isinstance(prompt, str) or self._sampler.options.api == "completions":
            return await self._ids(prompt=prompt if isinstance(prompt, str) else joined(messages))
        continues = messages[-1].role == "assistant"
        return await self._of_chat(messages, continues, replies=not continues)

    async def of_choice(self, choice: str) -> list[int]:
        """Tokenize a choice as a continuation: after a line break, as some tokenizers begin every text with a space."""
        async with self._lock:
            if choice not in self._choices:
                line = await self._ids(prompt="\n", add_special_tokens=False)
                whole = await self._ids(prompt="\n" + choice, add_special_tokens=False)
                if whole[: len(line)] != line:
                    whole, line = await self._ids(prompt=choice, add_special_tokens=False), []
                self._choices[choice] = whole[len(line) :]
            return self._choices[choice]

    async def end_of_turn(self) -> int:
        """Return the token that the chat template puts after an assistant message."""
        async with self._lock:
            if self._end is None:
                messages = (Message(role="user", content="x"), Message(role="assistant", content="x"))
                opened = await self._of_chat(messages, continues=True, replies=False)
                closed = await self._of_chat(messages, continues=False, replies=False)
                if closed[: len(opened)] != opened or len(closed) == len(opened):
                    raise CannotError
                self._end = closed[len(opened)]
            return self._end

    async def _of_chat(self, messages: Sequence[Message], continues: bool, replies: bool) -> list[int]:
        extra = self._sampler.options.extra
        return await self._ids(
            messages=[{"role": message.role, "content": message.content} for message in messages],
            add_generation_prompt=replies,
            continue_final_message=continues,
            **{name: extra[name] for name in ("chat_template_kwargs",) if name in extra},
        )

    async def _ids(self, **body: Any) -> list[int]:
        if not (ids := list(await self._sampler.tokenize(body))):
            raise CannotError
        return ids


class Choices:
    """Scores choices on one server, by the first way that it supports."""

    def __init__(self, sampler: Sampler) -> None:
        self._sampler = sampler
        self._tokens = ServerTokens(sampler)
        self._unsupported: set[str] = set()

    async def score(self, prompt: Prompt, request: Request, ask: Ask) -> Scores:
        """Score each of the request's choices after the prompt. Raises RequestError, and the exceptions of `ask`."""
        ways = {"next": self._by_next, "echo": self._by_echo, "server": self._by_server}
        failed = set()
        for name in self._sampler.client.server.choices:
            if name in self._unsupported:
                continue
            try:
                scores = await ways[name](prompt, request, ask)
            except CannotError:
                failed.add(name)
            except RefusedError as error:  # for the fields of this way, or for a prompt that every way refuses
                if error.status >= 500:
                    raise
                failed.add(name)
            else:
                self._unsupported |= failed
                return scores
        scores = await self._by_text(prompt, request, ask)
        self._unsupported |= failed
        self._sampler.warn(
            "choices are scored from the generated text: this server does not return the logprobs of given tokens"
        )
        return scores

    async def _ids(self, prompt: Prompt, request: Request) -> tuple[list[int], list[list[int]]]:
        """Return the tokens of the prompt and of each choice, with the end-of-turn token if choices are closed."""
        head = await self._tokens.of_prompt(prompt)
        end = [await self._tokens.end_of_turn()] if request.close_choices else []
        return head, [[*await self._tokens.of_choice(choice), *end] for choice in request.choices]

    async def _by_next(self, prompt: Prompt, request: Request, ask: Ask) -> Scores:
        head, choices = await self._ids(prompt, request)
        after: dict[tuple[int, ...], set[int]] = {}
        for choice in choices:
            for place, token in enumerate(choice):
                after.setdefault(tuple(choice[:place]), set()).add(token)
        first, *others = after.items()  # the first request caches the prompt's keys and values for the others
        results = [await self._next(head, *first, ask)]
        results += await together([partial(self._next, head, *other, ask) for other in others])
        logprobs = dict(zip(after, results, strict=True))
        return tuple(
            _summed([logprobs[tuple(choice[:place])][token] for place, token in enumerate(choice)], len(choice))
            for choice in choices
        )

    async def _next(self, head: list[int], prefix: tuple[int, ...], tokens: set[int], ask: Ask) -> dict[int, float]:
        """Return the logprobs of some tokens at the position after the prompt and a prefix of a choice."""
        body: dict[str, Any] = {"prompt": [*head, *prefix], "max_tokens": 1, "temperature": 0.0}
        fields = {"logprob_token_ids": sorted(tokens), "logprobs": len(tokens), "return_tokens_as_token_ids": True}
        try:
            top = (_logprobs(await ask(COMPLETIONS, body | fields)).top_logprobs or ())[0] or {}
            return {token: top[f"token_id:{token}"] for token in tokens}
        except LookupError:
            raise CannotError from None

    async def _by_echo(self, prompt: Prompt, request: Request, ask: Ask) -> Scores:
        head, choices = await self._ids(prompt, request)
        body = {"echo": True, "logprobs": 1, "max_tokens": 1, "temperature": 0.0}
        asked = [partial(ask, COMPLETIONS, {**body, "prompt": [*head, *choice]}) for choice in choices]
        echoed = [_logprobs(reply).token_logprobs or () for reply in await together(asked)]
        pairs = zip(choices, echoed, strict=True)
        return tuple(_summed(logprobs[len(head) :][: len(choice)], len(choice)) for choice, logprobs in pairs)

    async def _by_server(self, prompt: Prompt, request: Request, ask: Ask) -> Scores:
        path, body = address(prompt, self._sampler.options, self._sampler.client.server)
        choices = {"choices": list(request.choices), "close_choices": request.close_choices}
        scores = (await ask(path, {**body, **choices, "max_tokens": 1, "temperature": 0.0})).choices[0].choice_logprobs
        if len(scores) != len(request.choices):
            raise CannotError
        return scores

    async def _by_text(self, prompt: Prompt, request: Request, ask: Ask) -> Scores:
        path, body = address(prompt, self._sampler.options, self._sampler.client.server)
        limit = _MAX_REPLY_TOKENS + self._sampler.options.thinking_tokens
        choice = (await ask(path, {**body, "max_tokens": limit, "temperature": 0.0})).choices[0]
        if choice.problem:
            raise no_text(choice)
        return by_text(request.choices, choice.apart()[0])


def by_text(choices: Sequence[str], text: str) -> Scores:
    """Score choices by a generated text: 0 for the matching choice, `IMPOSSIBLE` for the others.

    The match is the longest choice that the text starts with, otherwise the first choice that it mentions.
    """
    text = text.strip().lower()
    lowered = {choice: choice.strip().lower() for choice in choices}
    at = {choice: text.index(lower) for choice, lower in lowered.items() if lower in text}
    chosen = min(at, key=lambda choice: (at[choice], -len(choice)), default=None)
    return tuple(ChoiceLogprob(0.0 if choice == chosen else IMPOSSIBLE, 1) for choice in choices)


def _logprobs(reply: ServerReply) -> Logprobs:
    if (logprobs := reply.choices[0].logprobs) is None:
        raise CannotError
    return logprobs


def _summed(logprobs: Sequence[float | None], tokens: int) -> ChoiceLogprob:
    known = [logprob for logprob in logprobs if logprob is not None]
    if not known or len(known) < tokens:
        raise CannotError
    return ChoiceLogprob(sum(known), len(known))
