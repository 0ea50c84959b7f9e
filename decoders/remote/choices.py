"""Score choices on a server: their logprobs as continuations of a prompt, by the most exact way that it supports.

next    Tokenize on the server (/tokenize), then request the logprobs of the choices' tokens, position by position
        (`logprob_token_ids`: vLLM). The server reuses the keys and values of the prompt.
echo    Send the prompt with each choice appended, and read the echoed logprobs (vLLM, SGLang). This is as exact, but
        the server computes the prompt again for each choice.
server  Send the choices to the server, which scores them (`tot serve`).
text    Generate greedily and match the text against the choices: an approximation, for all other servers.

The first three give the scores of a local decoder: a choice gets the same tokens as a continuation.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Any

from tot.decoders.errors import RefusedError
from tot.decoders.remote.body import COMPLETIONS, TOKENIZE, address, changed, message_json, messages_of, thinking_fields
from tot.decoders.remote.loop import together
from tot.decoders.remote.reply import Logprobs, ServerReply, TokenIds
from tot.decoders.remote.sampler import Sampler
from tot.decoders.request import ChoiceLogprob, Message, Request, Sampling, ThinkingOptions

IMPOSSIBLE = -100.0
"""Logprob (nats) of a choice that the generated text does not name."""
_REPLY = {"max_tokens": 24, "temperature": 0.0, "n": 1, "stop": (), "keep_stop": False}
"""The sampling of a reply that names a choice."""

Scores = tuple[ChoiceLogprob, ...]
Write = Callable[[Sampling], Awaitable[str]]
"""Returns a text after the prompt."""
Ask = Callable[[str, dict[str, Any]], Awaitable[ServerReply]]
"""Sends a body to a path. Raises RefusedError, ModelError, or an exception that ends all scoring."""


class CannotError(Exception):
    """The server does not support this way of scoring."""


class Choices:
    """Scores choices on one server, by the first way that it supports."""

    def __init__(self, sampler: Sampler) -> None:
        self._sampler = sampler
        self._unsupported: set[str] = set()
        self._choices: dict[str, list[int]] = {}
        self._end: list[int] = []
        """The token that the chat template puts after an assistant message, once it is known."""
        self._lock = asyncio.Lock()
        """Makes concurrent requests share one tokenization."""

    async def score(self, request: Request, ask: Ask, write: Write) -> Scores:
        """Score each of the request's choices after its prompt. Raises RequestError, and the exceptions of `ask`."""
        ways = {"next": self._by_next, "echo": self._by_echo, "server": self._by_server}
        failed = set()
        for name in self._sampler.client.server.choices:
            if name in self._unsupported:
                continue
            try:
                scores = await ways[name](request, ask)
            except CannotError:
                failed.add(name)
            except RefusedError as error:  # for the fields of this way, or for a prompt that every way refuses
                if error.status >= 500:
                    raise
                failed.add(name)
            else:
                self._unsupported |= failed
                return scores
        scores = by_text(request.choices, await write(request.sampling.model_copy(update=_REPLY)))
        self._unsupported |= failed
        self._sampler.client.warn(
            "choices are scored from the generated text: this server does not return the logprobs of given tokens"
        )
        return scores

    async def _by_next(self, request: Request, ask: Ask) -> Scores:
        head, choices = await self._tokens(request)
        after: dict[tuple[int, ...], set[int]] = {}
        for choice in choices:
            for place, token in enumerate(choice):
                after.setdefault(tuple(choice[:place]), set()).add(token)

        async def next_logprobs(prefix: tuple[int, ...], tokens: set[int]) -> dict[int, float]:
            body: dict[str, Any] = {"prompt": [*head, *prefix], "max_tokens": 1, "temperature": 0.0}
            fields = {"logprob_token_ids": sorted(tokens), "logprobs": len(tokens), "return_tokens_as_token_ids": True}
            try:
                top = _logprobs(await ask(COMPLETIONS, body | fields)).top_logprobs[0] or {}
                return {token: top[f"token_id:{token}"] for token in tokens}
            except LookupError:
                raise CannotError from None

        first, *others = after.items()  # the first request caches the prompt's keys and values for the others
        results = [await next_logprobs(*first), *await together([partial(next_logprobs, *other) for other in others])]
        logprobs = dict(zip(after, results, strict=True))
        return tuple(
            _summed([logprobs[tuple(choice[:place])][token] for place, token in enumerate(choice)], len(choice))
            for choice in choices
        )

    async def _by_echo(self, request: Request, ask: Ask) -> Scores:
        head, choices = await self._tokens(request)
        body = {"echo": True, "logprobs": 1, "max_tokens": 1, "temperature": 0.0}
        asked = [partial(ask, COMPLETIONS, {**body, "prompt": [*head, *choice]}) for choice in choices]
        echoed = [_logprobs(reply).token_logprobs for reply in await together(asked)]
        pairs = zip(choices, echoed, strict=True)
        return tuple(_summed(logprobs[len(head) :][: len(choice)], len(choice)) for choice, logprobs in pairs)

    async def _by_server(self, request: Request, ask: Ask) -> Scores:
        server = self._sampler.client.server
        path, body = address(request.prompt, server)
        choices = {"choices": list(request.choices), "close_choices": request.close_choices}
        choices |= thinking_fields(request, server)
        scores = (await ask(path, {**body, **choices, "max_tokens": 1, "temperature": 0.0})).choices[0].choice_logprobs
        if len(scores) != len(request.choices):
            raise CannotError
        return scores

    # -- the server's tokens ------------------------------------------------------------------------------------------

    async def _tokens(self, request: Request) -> tuple[list[int], list[list[int]]]:
        """Return the tokens of the prompt and of each choice, with the end-of-turn token if choices are closed."""
        prompt = request.prompt
        if request.answer_trigger is None:  # a choice is an answer
            request = changed(request, prompt, Sampling(thinking=ThinkingOptions(budget=0)))
        template = thinking_fields(request, self._sampler.client.server)
        template = {"chat_template_kwargs": template.get("chat_template_kwargs", {}), **self._sampler.options.extra}
        of_chat = partial(self._of_chat, template["chat_template_kwargs"])
        if messages := messages_of(prompt):
            continues = messages[-1].role == "assistant"
            head = await of_chat(messages, continues, replies=not continues)
        elif isinstance(prompt, str):
            head = await self._tokenized(prompt=prompt)
        else:
            head = [part for part in prompt if isinstance(part, int)]
        async with self._lock:
            for choice in set(request.choices) - self._choices.keys():
                self._choices[choice] = await self._of_choice(choice)
            if request.close_choices and not self._end:
                turn = (Message(role="user", content="x"), Message(role="assistant", content="x"))
                opened, closed = [await of_chat(turn, continues, replies=False) for continues in (True, False)]
                if closed[: len(opened)] != opened or len(closed) == len(opened):
                    raise CannotError
                self._end = closed[len(opened) :][:1]
        end = self._end if request.close_choices else []
        return head, [[*self._choices[choice], *end] for choice in request.choices]

    async def _of_choice(self, choice: str) -> list[int]:
        """Tokenize a choice as a continuation: after a line break, as some tokenizers begin every text with a space."""
        line = await self._tokenized(prompt="\n", add_special_tokens=False)
        whole = await self._tokenized(prompt="\n" + choice, add_special_tokens=False)
        if whole[: len(line)] == line:
            return whole[len(line) :]
        return await self._tokenized(prompt=choice, add_special_tokens=False)

    async def _of_chat(
        self, template: Mapping[str, Any], messages: Sequence[Message], continues: bool, replies: bool
    ) -> list[int]:
        return await self._tokenized(
            messages=[message_json(message) for message in messages],
            add_generation_prompt=replies,
            continue_final_message=continues,
            **({"chat_template_kwargs": template} if template else {}),
        )

    async def _tokenized(self, **body: Any) -> list[int]:
        client = self._sampler.client
        async with self._sampler.slots:
            reply = await client.post(TOKENIZE, {"model": client.model, **body}, TokenIds)
        if not reply.tokens:
            raise CannotError
        return [*reply.tokens]


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
