"""Score choices on a server: their logprobs as continuations of a prompt, by the most exact method it supports.

next    Tokenize on the server (/tokenize), then request the logprobs of the choices' tokens, position by position
        (`logprob_token_ids`: vLLM). The server reuses the keys and values of the prompt.
echo    Send the prompt with each choice appended, and read the echoed logprobs (vLLM, SGLang). This is as exact, but
        the server computes the prompt again for each choice.
server  Send the choices to the server, which scores them (`tot serve`).
text    Generate greedily and match the text against the choices: an approximation, for all other servers.

The first three give the scores of a local decoder. The method is logged once. This module knows nothing of connections
or budgets.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any

from tot.decoders.remote.body import COMPLETIONS, CONTINUING, Prompt, RefusedError, address, joined, messages_of
from tot.decoders.remote.loop import together
from tot.decoders.remote.options import RemoteOptions
from tot.decoders.remote.reply import Logprobs, ServerReply, apart
from tot.decoders.remote.samples import no_text, problem_with
from tot.decoders.request import ChoiceLogprob, Message, Request

log = logging.getLogger(__name__)

IMPOSSIBLE = -100.0
"""Logprob (nats) of a choice that the generated text does not name."""
_MAX_REPLY_TOKENS = 24
"""Maximum tokens of a reply that names a choice."""
_MEANING = {
    "next": "exactly, token by token",
    "echo": "exactly, by echo: this server computes the prompt again for each choice",
    "server": "exactly, by the server",
    "text": "from the generated text: this server does not return the logprobs of given tokens",
}

Scores = tuple[ChoiceLogprob, ...]


Ask = Callable[[str, dict[str, Any]], Awaitable[ServerReply]]
"""Sends a body to a path. Raises RefusedError, ModelError, or an exception that ends all scoring."""


class CannotError(Exception):
    """The server does not support this scoring method."""


class ServerTokens:
    """Prompts and choices as token ids, by the server's tokenizer and chat template.

    A choice gets the same tokens as a continuation that it gets in a local decoder.
    """

    def __init__(self, options: RemoteOptions, tokenize: Callable[[dict[str, Any]], Awaitable[Sequence[int]]]) -> None:
        """`tokenize` sends a body; it returns an empty sequence if the server has no such route."""
        self._options = options
        self._tokenize = tokenize
        self._choices: dict[str, list[int]] = {}
        self._end: int | None = None
        self._lock = asyncio.Lock()
        """Makes concurrent requests share one tokenization."""

    async def of_prompt(self, prompt: Prompt) -> list[int]:
        """Tokenize a prompt: with the chat template for messages, and with the server's special tokens."""
        messages = messages_of(prompt)
        if isinstance(prompt, tuple) and not messages:
            return [part for part in prompt if isinstance(part, int)]
        if isinstance(prompt, str) or self._options.api == "completions":
            return await self._request(prompt=prompt if isinstance(prompt, str) else joined(messages))
        return await self._of_chat(messages, messages[-1].role == "assistant")

    async def of_choice(self, choice: str) -> list[int]:
        """Tokenize a choice as a continuation: after a line break, as some tokenizers begin every text with a space."""
        async with self._lock:
            if choice not in self._choices:
                line = await self._request(prompt="\n", add_special_tokens=False)
                whole = await self._request(prompt="\n" + choice, add_special_tokens=False)
                if whole[: len(line)] != line:
                    whole, line = await self._request(prompt=choice, add_special_tokens=False), []
                self._choices[choice] = whole[len(line) :]
            return self._choices[choice]

    async def end_of_turn(self) -> int:
        """Return the token that the chat template puts after an assistant message."""
        async with self._lock:
            if self._end is None:
                messages = (Message(role="user", content="x"), Message(role="assistant", content="x"))
                opened = await self._of_chat(messages, True)
                closed = await self._of_chat(messages, False, replies=False)
                if closed[: len(opened)] != opened or len(closed) == len(opened):
                    raise CannotError
                self._end = closed[len(opened)]
            return self._end

    async def _of_chat(self, messages: Sequence[Message], continues: bool, replies: bool = True) -> list[int]:
        template = {name: value for name, value in self._options.extra.items() if name == "chat_template_kwargs"}
        return await self._request(
            messages=[{"role": message.role, "content": message.content} for message in messages],
            add_generation_prompt=replies and not continues,
            continue_final_message=continues,
            **template,
        )

    async def _request(self, **body: Any) -> list[int]:
        ids = list(await self._tokenize(body))
        if not ids:
            raise CannotError
        return ids


class Choices:
    """Scores choices on one server, and remembers the methods that it does not support."""

    def __init__(self, options: RemoteOptions, tokens: ServerTokens) -> None:
        self._options = options
        self._tokens = tokens
        self._methods: dict[str, Callable[[Prompt, Request, Ask], Awaitable[Scores]]] = {
            "next": self._by_next,
            "echo": self._by_echo,
            "server": self._by_server,
            "text": self._by_text,
        }
        self._logged: set[str] = set()
        self._min_tokens = 0
        """`max_tokens` of a request that only echoes its prompt: 0, or 1 if the server rejects 0."""

    async def score(self, prompt: Prompt, request: Request, ask: Ask) -> Scores:
        """Score each of the request's choices after the prompt. Raises RequestError, and the exceptions of `ask`."""
        for name, method in list(self._methods.items()):
            try:
                scores = await method(prompt, request, ask)
            except CannotError:
                self._methods.pop(name, None)
                continue
            if name not in self._logged:
                self._logged.add(name)
                log.log(logging.WARNING if name == "text" else logging.INFO, "choices are scored %s", _MEANING[name])
            return scores
        raise AssertionError("scoring from the generated text never raises CannotError")

    async def are_exact(self, request: Request, ask: Ask) -> bool:
        """Score the choices of a request, and return whether the server scores them exactly."""
        await self.score(request.prompt, request, ask)
        return next(iter(self._methods)) != "text"

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
            _summed([logprobs[tuple(choice[:place])][token] for place, token in enumerate(choice)])
            for choice in choices
        )

    async def _next(self, head: list[int], prefix: tuple[int, ...], tokens: set[int], ask: Ask) -> dict[int, float]:
        """Return the logprobs of some tokens at the position after the prompt and a prefix of a choice."""
        body: dict[str, Any] = {"prompt": [*head, *prefix], "max_tokens": 1, "temperature": 0.0}
        fields = {"logprob_token_ids": sorted(tokens), "logprobs": len(tokens), "return_tokens_as_token_ids": True}
        logprobs = _logprobs(await _unless_refused(ask(COMPLETIONS, body | fields), "logprob", "prompt", "token"))
        try:
            top = (logprobs.top_logprobs or ())[0] or {}
            return {token: top[f"token_id:{token}"] for token in tokens}
        except LookupError:
            raise CannotError from None

    async def _by_echo(self, prompt: Prompt, request: Request, ask: Ask) -> Scores:
        head, choices = await self._ids(prompt, request)
        results = await together([partial(self._echoed, [*head, *choice], ask) for choice in choices])
        if any(len(logprobs) < len(head) + len(choice) for choice, logprobs in zip(choices, results, strict=True)):
            raise CannotError
        pairs = zip(choices, results, strict=True)
        return tuple(_summed(logprobs[len(head) : len(head) + len(choice)]) for choice, logprobs in pairs)

    async def _echoed(self, prompt: list[int], ask: Ask) -> Sequence[float | None]:
        """Return the logprobs of a prompt's tokens, followed by the logprobs of any new tokens."""
        body = {"prompt": prompt, "echo": True, "logprobs": 1, "max_tokens": self._min_tokens, "temperature": 0.0}
        try:
            reply = await _unless_refused(ask(COMPLETIONS, body), "echo", "logprobs", "prompt")
        except RefusedError as error:
            if body["max_tokens"] == 1 or "max_tokens" not in error.said:
                raise
            self._min_tokens = 1
            return await self._echoed(prompt, ask)
        return _logprobs(reply).token_logprobs or ()

    async def _by_server(self, prompt: Prompt, request: Request, ask: Ask) -> Scores:
        path, body = address(prompt, self._options)
        choices = {"choices": list(request.choices), "close_choices": request.close_choices}
        body = {**body, **choices, "max_tokens": 1, "temperature": 0.0}
        scores = (await _unless_refused(ask(path, body), "choices", *CONTINUING)).choices[0].choice_logprobs
        if len(scores) != len(request.choices):
            raise CannotError
        return scores

    async def _by_text(self, prompt: Prompt, request: Request, ask: Ask) -> Scores:
        path, body = address(prompt, self._options)
        limit = _MAX_REPLY_TOKENS + self._options.thinking_tokens
        reply = await ask(path, {**body, "max_tokens": limit, "temperature": 0.0})
        if problem := problem_with(reply.choices[0]):
            raise no_text(problem)
        return by_text(request.choices, apart(reply.choices[0])[0])


def by_text(choices: Sequence[str], text: str) -> Scores:
    """Score choices by a generated text: 0 for the matching choice, `IMPOSSIBLE` for the others.

    The match is the longest choice that the text starts with, otherwise the first choice that it mentions.
    """
    text = text.strip().lower()
    lowered = {choice: choice.strip().lower() for choice in choices}
    prefixes = [choice for choice, lower in lowered.items() if text.startswith(lower)]
    mentioned = [choice for choice, lower in lowered.items() if lower in text]
    chosen = None
    if prefixes:
        chosen = max(prefixes, key=len)
    elif mentioned:
        chosen = min(mentioned, key=lambda choice: (text.index(lowered[choice]), -len(choice)))
    return tuple(ChoiceLogprob(0.0 if choice == chosen else IMPOSSIBLE, 1) for choice in choices)


async def _unless_refused(reply: Awaitable[ServerReply], *fields: str) -> ServerReply:
    """Return the reply. Raises CannotError if the server rejects one of the fields, RefusedError for other errors."""
    try:
        return await reply
    except RefusedError as error:
        if "max_tokens" not in error.said and any(name in error.said for name in fields):
            raise CannotError from None
        raise


def _logprobs(reply: ServerReply) -> Logprobs:
    logprobs = reply.choices[0].logprobs
    if logprobs is None:
        raise CannotError
    return logprobs


def _summed(logprobs: Sequence[float | None]) -> ChoiceLogprob:
    known = [logprob for logprob in logprobs if logprob is not None]
    if not known or len(known) < len(logprobs):
        raise CannotError
    return ChoiceLogprob(sum(known), len(known))
