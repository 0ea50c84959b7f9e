"""Scoring choices on a server: their log-probabilities as continuations of a prompt, as exactly as the server can say.

next   the server's own tokens (/tokenize), and at each place the log-probabilities of those that may come next
       (`logprob_token_ids`: vLLM). The prompt's keys and values are re-used.
echo   the same tokens, each choice after the prompt, echoed with their log-probabilities (vLLM, SGLang): as exact, but
       each computes the prompt again.
asked  by the server itself, which is sent the choices (`tot serve`). These three are what a local decoder computes.
said   by what the server writes, greedily: a guess, for servers that can do none of them.

Which is used is logged once. Knows nothing of connections or budgets.
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
"""Nats of a choice that was not said."""
_WORDS = 24
"""Most tokens of a reply that is to name a choice."""
_MEANING = {
    "next": "exactly, token by token",
    "echo": "exactly, by echo: this server computes a prompt anew for each choice",
    "asked": "exactly, by the server",
    "said": "by what the model writes: this server scores no texts",
}

Scores = tuple[ChoiceLogprob, ...]


Ask = Callable[[str, dict[str, Any]], Awaitable[ServerReply]]
"""Sends a body to a path. May raise RefusedError or ModelError, and whatever ends all scoring."""


class CannotError(Exception):
    """This server can't do it: another way has to be found."""


class ServerTokens:
    """Prompts and choices as the token ids that the server makes of them.

    The template is the server's; what a choice is as a continuation is what a local decoder makes of it.
    """

    def __init__(self, options: RemoteOptions, tokenize: Callable[[dict[str, Any]], Awaitable[Sequence[int]]]) -> None:
        """`tokenize` sends a body; it gives nothing where the server has no such route."""
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
        ids = list(await self._tokenize(body))
        if not ids:
            raise CannotError
        return ids


class Choices:
    """Scores the choices of one server's requests; remembers what it can't do."""

    def __init__(self, options: RemoteOptions, tokens: ServerTokens) -> None:
        self._options = options
        self._tokens = tokens
        self._ways: dict[str, Callable[[Prompt, Request, Ask], Awaitable[Scores]]] = {
            "next": self._by_next,
            "echo": self._by_echo,
            "asked": self._by_asking,
            "said": self._by_said,
        }
        self._told: set[str] = set()
        self._least = 0
        """`max_tokens` of a prompt that is only to be echoed: 0, or 1 where the server wants some."""

    async def score(self, prompt: Prompt, request: Request, ask: Ask) -> Scores:
        """A score for each of the request's choices after the prompt. Raises what `ask` does, or RequestError."""
        for way, scored in list(self._ways.items()):
            try:
                scores = await scored(prompt, request, ask)
            except CannotError:
                self._ways.pop(way, None)
                continue
            if way not in self._told:
                self._told.add(way)
                log.log(logging.WARNING if way == "said" else logging.INFO, "choices are scored %s", _MEANING[way])
            return scores
        raise AssertionError("what is said can always be read")

    async def _ids(self, prompt: Prompt, request: Request) -> tuple[list[int], list[list[int]]]:
        """The prompt's tokens, and those of each choice, closed where they are to be."""
        head = await self._tokens.of_prompt(prompt)
        end = [await self._tokens.end_of_turn()] if request.close_choices else []
        return head, [[*await self._tokens.of_choice(choice), *end] for choice in request.choices]

    async def _by_next(self, prompt: Prompt, request: Request, ask: Ask) -> Scores:
        head, choices = await self._ids(prompt, request)
        after: dict[tuple[int, ...], set[int]] = {}
        for choice in choices:
            for place, token in enumerate(choice):
                after.setdefault(tuple(choice[:place]), set()).add(token)
        first, *others = after.items()  # the first leaves the prompt's keys and values for the others to find
        found = [await self._next(head, *first, ask)]
        found += await together([partial(self._next, head, *other, ask) for other in others])
        logprobs = dict(zip(after, found, strict=True))
        return tuple(
            _summed([logprobs[tuple(choice[:place])][token] for place, token in enumerate(choice)])
            for choice in choices
        )

    async def _next(self, head: list[int], begun: tuple[int, ...], wanted: set[int], ask: Ask) -> dict[int, float]:
        """The log-probabilities of certain tokens in the place after the prompt and what a choice has begun with."""
        body: dict[str, Any] = {"prompt": [*head, *begun], "max_tokens": 1, "temperature": 0.0}
        asked = {"logprob_token_ids": sorted(wanted), "logprobs": len(wanted), "return_tokens_as_token_ids": True}
        found = _logprobs(await _unless_refused(ask(COMPLETIONS, body | asked), "logprob", "prompt", "token"))
        try:
            likely = (found.top_logprobs or ())[0] or {}
            return {token: likely[f"token_id:{token}"] for token in wanted}
        except LookupError:
            raise CannotError from None

    async def _by_echo(self, prompt: Prompt, request: Request, ask: Ask) -> Scores:
        head, choices = await self._ids(prompt, request)
        found = await together([partial(self._echoed, [*head, *choice], ask) for choice in choices])
        if any(len(told) < len(head) + len(choice) for choice, told in zip(choices, found, strict=True)):
            raise CannotError
        ends = zip(choices, found, strict=True)
        return tuple(_summed(told[len(head) : len(head) + len(choice)]) for choice, told in ends)

    async def _echoed(self, prompt: list[int], ask: Ask) -> Sequence[float | None]:
        """What the server says about a prompt's own tokens, and about any that it drew after them."""
        body = {"prompt": prompt, "echo": True, "logprobs": 1, "max_tokens": self._least, "temperature": 0.0}
        try:
            reply = await _unless_refused(ask(COMPLETIONS, body), "echo", "logprobs", "prompt")
        except RefusedError as error:
            if body["max_tokens"] == 1 or "max_tokens" not in error.said:
                raise
            self._least = 1
            return await self._echoed(prompt, ask)
        return _logprobs(reply).token_logprobs or ()

    async def _by_asking(self, prompt: Prompt, request: Request, ask: Ask) -> Scores:
        path, body = address(prompt, self._options)
        choices = {"choices": list(request.choices), "close_choices": request.close_choices}
        asked = {**body, **choices, "max_tokens": 1, "temperature": 0.0}
        found = (await _unless_refused(ask(path, asked), "choices", *CONTINUING)).choices[0].choice_logprobs
        if len(found) != len(request.choices):
            raise CannotError
        return found

    async def _by_said(self, prompt: Prompt, request: Request, ask: Ask) -> Scores:
        path, body = address(prompt, self._options)
        limit = _WORDS + self._options.thinking_tokens
        reply = await ask(path, {**body, "max_tokens": limit, "temperature": 0.0})
        if problem := problem_with(reply.choices[0]):
            raise no_text(problem)
        return by_text(request.choices, apart(reply.choices[0])[0])


def by_text(choices: Sequence[str], text: str) -> Scores:
    """0 for the choice that a text begins with, the longest if there are several, or else for the one it names first;
    -100 for the others."""
    text = text.strip().lower()
    wanted = {choice: choice.strip().lower() for choice in choices}
    begun = [choice for choice, said in wanted.items() if text.startswith(said)]
    named = [choice for choice, said in wanted.items() if said in text]
    chosen = None
    if begun:
        chosen = max(begun, key=len)
    elif named:
        chosen = min(named, key=lambda choice: (text.index(wanted[choice]), -len(choice)))
    return tuple(ChoiceLogprob(0.0 if choice == chosen else IMPOSSIBLE, 1) for choice in choices)


async def _unless_refused(asked: Awaitable[ServerReply], *about: str) -> ServerReply:
    """The reply. Raises CannotError for a refusal that names what it is about, or any other one as it is."""
    try:
        return await asked
    except RefusedError as error:
        if "max_tokens" not in error.said and any(name in error.said for name in about):
            raise CannotError from None
        raise


def _logprobs(reply: ServerReply) -> Logprobs:
    found = reply.choices[0].logprobs
    if found is None:
        raise CannotError
    return found


def _summed(logprobs: Sequence[float | None]) -> ChoiceLogprob:
    known = [one for one in logprobs if one is not None]
    if not known or len(known) < len(logprobs):
        raise CannotError
    return ChoiceLogprob(sum(known), len(known))
