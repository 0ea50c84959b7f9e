"""Scoring choices on a server: their log-probabilities as continuations of a prompt, as exactly as the server can say.

next   the server's own tokens (/tokenize), and at each place the log-probabilities of those that may come next
       (`logprob_token_ids`: vLLM). The prompt's keys and values are re-used.
echo   the same tokens, each choice after the prompt, echoed with their log-probabilities (vLLM, SGLang): as exact, but
       each computes the prompt again.
asked  by the server itself, which is sent the choices (`tot serve`). These three are what a local decoder computes.
text   for prompts that are text, without /tokenize: echoed, and a choice's tokens found by their places in it.
first  by the likely first tokens of a reply, where no token begins two choices.
said   by what the server writes, greedily.

Which is used is logged once; the last two are guesses (`guesses.py`). Knows nothing of connections or budgets.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any, Protocol

from tot.decoders.errors import RequestError
from tot.decoders.remote.body import CHAT, COMPLETIONS, CONTINUING, Prompt, address, joined, messages_of
from tot.decoders.remote.faults import RefusedError
from tot.decoders.remote.guesses import by_first_token, by_text
from tot.decoders.remote.loop import together
from tot.decoders.remote.options import RemoteOptions
from tot.decoders.remote.reply import apart
from tot.decoders.remote.tokens import CannotError, ServerTokens
from tot.decoders.remote.wire import Logprobs, Reply
from tot.decoders.request import ChoiceLogprob, Request

log = logging.getLogger(__name__)

_LIKELY = 20
"""Tokens asked for in the first place: OpenAI's and vLLM's most."""
_WORDS = 24
"""Most tokens of a reply that is to name a choice."""
_MEANING = {
    "next": "exactly, token by token",
    "echo": "exactly, by echo: this server computes a prompt anew for each choice",
    "asked": "exactly, by the server",
    "text": "by the places of their texts: this server does not say where tokens begin, nor what ends a turn",
    "first": "by their first tokens alone: this server scores no texts",
    "said": "by what the model writes: this server gives no log-probabilities, or one token begins several choices",
}
_EXACT = ("next", "echo", "asked")

Scores = tuple[ChoiceLogprob, ...]


class Ask(Protocol):
    """Sends a body. Raises SpentError, RefusedError or ModelError."""

    async def __call__(self, path: str, body: dict[str, Any]) -> Reply: ...


class Choices:
    """Scores the choices of one server's requests; remembers what it can't do."""

    def __init__(self, options: RemoteOptions, tokens: ServerTokens) -> None:
        self._options = options
        self._tokens = tokens
        self._cannot: set[str] = set()
        self._told: set[str] = set()
        self._echoes = False
        self._least = 0
        """`max_tokens` of a prompt that is only to be echoed: 0, or 1 where the server wants some."""

    async def score(self, prompt: Prompt, request: Request, ask: Ask) -> Scores:
        """A score for each of the request's choices after the prompt. Raises what `ask` does, or RequestError."""
        ways: dict[str, Callable[[Prompt, Request, Ask], Awaitable[Scores | None]]] = {
            "next": self._by_next,
            "echo": self._by_echo,
            "asked": self._by_asking,
            "text": self._by_text,
            "first": self._by_first,
            "said": self._by_said,
        }
        for way, scored in ways.items():
            if way in self._cannot or (way == "text" and not self._is_text(prompt)):
                continue
            try:
                scores = await scored(prompt, request, ask)
            except CannotError:
                self._cannot.add(way)
                continue
            if scores is None:  # these choices can't be told apart so
                continue
            if way not in self._told:
                self._told.add(way)
                log.log(logging.INFO if way in _EXACT else logging.WARNING, "choices are scored %s", _MEANING[way])
            return scores
        raise RequestError("this server can't score choices after token ids: give text or messages")

    def _is_text(self, prompt: Prompt) -> bool:
        return isinstance(prompt, str) or (bool(messages_of(prompt)) and self._options.api == "completions")

    # -- by the server's tokens ---------------------------------------------------------------------------------------

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
        found = _logprobs(await _unless_refused(ask(COMPLETIONS, body | asked), "logprob", "prompt", "token")).first
        try:
            return {token: found[f"token_id:{token}"] for token in wanted}
        except KeyError:
            raise CannotError from None

    async def _by_echo(self, prompt: Prompt, request: Request, ask: Ask) -> Scores:
        head, choices = await self._ids(prompt, request)
        found = await together([partial(self._echoed, [*head, *choice], ask) for choice in choices])
        scores = []
        for choice, logprobs in zip(choices, found, strict=True):
            told = logprobs.token_logprobs or ()
            if len(told) < len(head) + len(choice):
                raise CannotError
            scores.append(_summed(told[len(head) : len(head) + len(choice)]))
        return tuple(scores)

    async def _by_asking(self, prompt: Prompt, request: Request, ask: Ask) -> Scores:
        path, body = address(prompt, self._options)
        choices = {"choices": list(request.choices), "close_choices": request.close_choices}
        asked = {**body, **choices, "max_tokens": 1, "temperature": 0.0}
        reply = await _unless_refused(ask(path, asked), "choices", *CONTINUING)
        found = reply.choices[0].choice_logprobs
        if len(found) != len(request.choices):
            raise CannotError
        return tuple(ChoiceLogprob(one.total, one.tokens) for one in found)

    # -- by the places of their texts ---------------------------------------------------------------------------------

    async def _by_text(self, prompt: Prompt, request: Request, ask: Ask) -> Scores:
        head = prompt if isinstance(prompt, str) else joined(messages_of(prompt))
        await self._see_whether_it_echoes(head, ask)
        found = await together([partial(self._echoed, head + choice, ask) for choice in request.choices])
        return at_the_end(found, request.choices)

    async def _see_whether_it_echoes(self, text: str, ask: Ask) -> None:
        """With a token to draw, once: servers that know of no echo may break down where there is none."""
        if not self._echoes:
            body = {"prompt": text, "echo": True, "logprobs": 1, "max_tokens": 1, "temperature": 0.0}
            reply = await _unless_refused(ask(COMPLETIONS, body), "echo", "logprobs")
            if not (reply.choices[0].text or "").startswith(text) or not _logprobs(reply).token_logprobs:
                raise CannotError
            self._echoes = True

    async def _echoed(self, prompt: str | list[int], ask: Ask) -> Logprobs:
        """What the server says about a prompt's own tokens, without any that it drew after them."""
        body: dict[str, Any] = {"prompt": prompt, "echo": True, "logprobs": 1, "max_tokens": self._least}
        body["temperature"] = 0.0
        try:
            reply = await _unless_refused(ask(COMPLETIONS, body), "echo", "logprobs", "prompt")
        except RefusedError as error:
            if body["max_tokens"] == 1 or "max_tokens" not in error.said:
                raise
            self._least = 1
            return await self._echoed(prompt, ask)
        found = _logprobs(reply)
        if not body["max_tokens"]:
            return found
        drawn = (reply.usage is not None and reply.usage.completion_tokens) or 1
        lists = ("tokens", "token_logprobs", "text_offset")
        return Logprobs(**{name: value[:-drawn] for name in lists if (value := getattr(found, name)) is not None})

    # -- by what little is said ---------------------------------------------------------------------------------------

    async def _by_first(self, prompt: Prompt, request: Request, ask: Ask) -> Scores | None:
        path, body = address(prompt, self._options)
        likely = {"logprobs": True, "top_logprobs": _LIKELY} if path == CHAT else {"logprobs": _LIKELY}
        asked = {**body, "max_tokens": 1, "temperature": 0.0, **likely}
        found = _logprobs(await _unless_refused(ask(path, asked), "logprobs"))
        if not found.first:
            raise CannotError
        return by_first_token(request.choices, found.first)

    async def _by_said(self, prompt: Prompt, request: Request, ask: Ask) -> Scores:
        path, body = address(prompt, self._options)
        limit = _WORDS + self._options.thinking_tokens
        reply = await ask(path, {**body, "max_tokens": limit, "temperature": 0.0})
        return by_text(request.choices, apart(reply.choices[0])[0])


def at_the_end(echoed: Sequence[Logprobs], choices: Sequence[str]) -> Scores:
    """The scores of texts at the end of echoed prompts that are the same before, by their tokens' places.

    Places are counted from the end: a begin-of-text token may count as characters or not. Where a token holds the end
    of the prompt and the beginning of a choice, all choices are scored from its place on. Raises CannotError where
    places are not told.
    """
    begins = []
    for logprobs, choice in zip(echoed, choices, strict=True):
        offsets, tokens = logprobs.text_offset or (), logprobs.tokens or ()
        if not (len(offsets) == len(tokens) == len(logprobs.token_logprobs or ()) > 0):
            raise CannotError
        begin = offsets[-1] + len(tokens[-1]) - len(choice)
        begins.append(max((offset for offset in offsets if offset <= begin), default=offsets[0]))
    first = min(begins)
    return tuple(
        _summed(
            [
                told
                for offset, told in zip(one.text_offset or (), one.token_logprobs or (), strict=True)
                if offset >= first
            ]
        )
        for one in echoed
    )


async def _unless_refused(asked: Awaitable[Reply], *about: str) -> Reply:
    """The reply. Raises CannotError for a refusal that names what it is about, or any other one as it is."""
    try:
        return await asked
    except RefusedError as error:
        if "max_tokens" not in error.said and any(name in error.said for name in about):
            raise CannotError from None
        raise


def _logprobs(reply: Reply) -> Logprobs:
    found = reply.choices[0].logprobs
    if found is None:
        raise CannotError
    return found


def _summed(logprobs: Sequence[float | None]) -> ChoiceLogprob:
    known = [one for one in logprobs if one is not None]
    if not known or len(known) < len(logprobs):
        raise CannotError
    return ChoiceLogprob(sum(known), len(known))
