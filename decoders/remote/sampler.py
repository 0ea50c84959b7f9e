"""Draw samples from one model on one server, within its concurrency and the search's budget."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from tot.decoders.budget import Meter
from tot.decoders.errors import OptionError, RefusedError
from tot.decoders.remote.body import Prompt, body_of, messages_of, prefix_of
from tot.decoders.remote.loop import together
from tot.decoders.remote.reply import ServerReply, completions_of
from tot.decoders.request import Completion, Part, Sampling, Usage

if TYPE_CHECKING:
    from tot.decoders.remote.client import Client

CUT = Completion("", (), 0.0, "budget", Usage(), parts=(Part("exact", ""),))
"""The completion of a request whose budget was spent before the reply."""
_LONG_PROMPT, _MAX_CHARACTERS_PER_TOKEN = 4000, 20
"""Prompts above this length (characters) are checked for truncation, by this bound on the average token length."""
_LONGEST_TOKEN = 200
"""Characters of a new token; a text with more of them ignores `max_tokens`, and reading it could take minutes."""
_MAX_COINCIDENCE = 20
"""Texts up to this length (characters) may be equal by chance."""


class SpentError(Exception):
    """The budget is spent."""


class Sampler:
    """Draws samples from the model of a client, for use in one event loop."""

    def __init__(self, client: Client) -> None:
        self.client = client
        self.options = client.options
        self.slots = asyncio.Semaphore(self.options.concurrency)
        self._takes_n = True
        """Whether the server returns several samples per request; otherwise one request is sent per sample."""
        self._renamed: dict[str, str] = {}
        """Fields that the server refuses, and their other names; an empty name leaves the field out."""

    async def ask(self, meter: Meter, path: str, body: dict[str, Any]) -> tuple[ServerReply, Usage]:
        """Send a body, adapted to the server, and return the reply and its usage, which `meter` counts.

        Raises SpentError if the meter's budget is spent, RefusedError or ModelError.
        """
        async with self.slots:
            reply = await self._reply(meter, path, body)
        longest = max(len(choice.text) + len(choice.reasoning or "") for choice in reply.choices)
        if longest > _LONGEST_TOKEN * (body["max_tokens"] + 1) and not body.get("echo"):
            said = f"a text has {longest:,} characters, and max_tokens is {body['max_tokens']:,}"
            raise RefusedError(f"{self.client} ignores a limit: {said}; use another server", said, 502)
        usage = self._usage(reply, body)
        meter.count(new_tokens=usage.new_tokens)
        return reply, usage

    async def _reply(self, meter: Meter, path: str, body: dict[str, Any]) -> ServerReply:
        """Return the reply to a body. Sends it again with other fields if the server refuses a field."""
        while True:
            if meter.overspent() is not None:
                raise SpentError
            sent, limit = self._fitted(body), meter.budget.seconds
            try:
                async with asyncio.timeout(None if limit is None else limit - meter.seconds):
                    return await self.client.post(path, sent, ServerReply)
            except TimeoutError:
                raise SpentError from None
            except RefusedError as error:
                if "max_tokens" in sent and "max_completion_tokens" in error.said:  # OpenAI's reasoning models
                    self._renamed["max_tokens"] = "max_completion_tokens"
                elif "seed" in sent and re.search(r"\bseed\b", error.said):  # Mistral's API
                    self._renamed["seed"] = ""
                    self.client.warn("this server does not accept a seed: its samples are not reproducible")
                elif self.options.logprobs and "logprob" in error.said:
                    message = f"{error}: remove the option logprobs, or use another server"
                    raise RefusedError(message, error.said) from None
                if self._fitted(body) == sent:
                    raise

    def _fitted(self, body: dict[str, Any]) -> dict[str, Any]:
        names = {name: self._renamed.get(name, name) for name in body}
        fitted = {names[name]: value for name, value in body.items() if names[name]}
        return {"model": self.client.model, **fitted, **self.options.extra}

    def _usage(self, reply: ServerReply, body: dict[str, Any]) -> Usage:
        """Return the usage of a reply; 0 for counts that the server does not report."""
        tokens, client = reply.usage, self.client
        if tokens is None or tokens.completion_tokens is None:
            client.warn("%s does not report the number of new tokens: a budget estimates them from the texts", client)
        if tokens is None:
            return Usage()
        prompt, texts = tokens.prompt_tokens or 0, [message["content"] for message in body.get("messages", ())]
        characters = sum(map(len, texts)) or (len(body["prompt"]) if isinstance(body.get("prompt"), str) else 0)
        if characters > _LONG_PROMPT and 0 < prompt * _MAX_CHARACTERS_PER_TOKEN < characters:
            message = "%s counts %d prompt tokens in %d characters: it may have truncated the prompt"
            client.warn(message, client, prompt, characters)
        return Usage(prompt, min(prompt, tokens.cached_tokens or 0), tokens.completion_tokens or 0)

    async def samples(
        self, prompt: Prompt, sampling: Sampling, meter: Meter, fields: Mapping[str, Any]
    ) -> list[Completion]:
        """Draw n samples of a prompt, with additional request fields.

        Raises OptionError if the server ignores a filter, or does not continue messages and must (`keep_stop`).
        """
        self._check(prompt, sampling)
        n = sampling.n if sampling.temperature else 1
        done: list[Completion] = []
        if n == 1 or self._takes_n:
            try:
                done = (await self._drawn(prompt, sampling, 0, n, meter, fields))[:n]
            except RefusedError:  # whatever the message: the server may support only one sample per request
                if n == 1:
                    raise
                done = await self._drawn(prompt, sampling, 0, 1, meter, fields)
        if len(done) < n:
            if done and done[0] is not CUT:  # n samples were requested, one was returned
                self._takes_n = False
            rest = [partial(self._drawn, prompt, sampling, i, 1, meter, fields) for i in range(len(done), n)]
            done += [samples[0] for samples in await together(rest)]
        if n > 2 and len({sample.text for sample in done}) == 1 and len(done[0].text) > _MAX_COINCIDENCE:
            message = "all %d samples at temperature %g have the same text: check whether the server caches its replies"
            self.client.warn(message, n, sampling.temperature)
        return done + [replace(done[0], usage=Usage(seconds=done[0].usage.seconds))] * (sampling.n - n)

    def _check(self, prompt: Prompt, sampling: Sampling) -> None:
        """Refuse options that the server ignores, or warn if that is not known."""
        server, where, warn = self.client.server, self.options.base_url, self.client.warn
        for name in ("top_k", "min_p"):
            if sampling.temperature and getattr(sampling, name) and not server.filters:
                if server.filters is False:
                    raise OptionError(f"{server.title} ignores {name}: leave {name} out")
                warn(f"the server at {where} may ignore {name}, which is not in OpenAI's protocol")
        if server.continues or not messages_of(prompt):
            return
        problem = f"the server at {where} is not known to continue an assistant message"
        if sampling.keep_stop:
            raise OptionError(
                f"{problem}, which generator=continue needs: use generator=sample, or vLLM, SGLang, llama-server, "
                "Ollama or tot serve (behind a proxy, name it by the option server)"
            )
        if prefix_of(prompt):
            warn(f"{problem}: it may start a new reply instead")

    async def _drawn(
        self, prompt: Prompt, sampling: Sampling, index: int, n: int, meter: Meter, fields: Mapping[str, Any]
    ) -> list[Completion]:
        """Draw n samples, or fewer if the server returns fewer; the first has this index."""
        start = time.monotonic()
        path, body = body_of(prompt, sampling, self.options, self.client.server, index, n)
        body |= fields
        try:
            reply, usage = await self.ask(meter, path, body)
            if sampling.keep_stop and "stop" in body and any(choice.stopped_blank for choice in reply.choices):
                del body["stop"]  # a stop string after nothing but whitespace does not end a text
                reply, more = await self.ask(meter, path, body)
                usage += more
        except SpentError:
            return [CUT] * n
        usage = replace(usage, seconds=time.monotonic() - start)
        return completions_of(reply, sampling, self.options.logprobs, usage, "stop" in body)
