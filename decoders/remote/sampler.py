"""Draw n samples of a prompt from one server.

Works around servers that do not support `n`, stop strings that stay in the text, or continued assistant messages.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from functools import partial

from tot.decoders.budget import Meter
from tot.decoders.errors import OptionError
from tot.decoders.remote.body import (
    KEEP_STOP,
    Prompt,
    RefusedError,
    address,
    counting,
    for_tot,
    messages_of,
    sampled,
    seed_of,
)
from tot.decoders.remote.endpoint import Endpoint, SpentError
from tot.decoders.remote.loop import together
from tot.decoders.remote.reply import apart
from tot.decoders.remote.samples import CUT, UnknownEndError, samples_of
from tot.decoders.request import Completion, Sampling, Usage

_MAX_COINCIDENCE = 20
"""Texts up to this length (characters) may be equal by chance."""


class Sampler:
    """Draws samples from one endpoint."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint
        self._dialect = endpoint.dialect
        self._options = endpoint.options
        self._trying = asyncio.Lock()

    async def samples(self, prompt: Prompt, sampling: Sampling, meter: Meter) -> list[Completion]:
        """Draw n samples of a prompt."""
        n = sampling.n if sampling.temperature else 1
        done: list[Completion] = []
        if n == 1 or self._dialect.n:
            try:
                done = (await self._drawn(prompt, sampling, 0, n, meter))[:n]
            except RefusedError:  # whatever the message: the server may support only one sample per request
                if n == 1:
                    raise
                done = await self._drawn(prompt, sampling, 0, 1, meter)
        if len(done) < n:
            if done and done[0] is not CUT:  # n samples were requested, one was returned
                self._dialect.n = False
            rest = [partial(self._drawn, prompt, sampling, i, 1, meter) for i in range(len(done), n)]
            done += [samples[0] for samples in await together(rest)]
        if n > 2 and len({sample.text for sample in done}) == 1 and len(done[0].text) > _MAX_COINCIDENCE:
            self._endpoint.warn(
                "all %d samples at temperature %g have the same text: check whether the server caches its replies",
                n,
                sampling.temperature,
            )
        return done + [replace(done[0], usage=Usage(seconds=done[0].usage.seconds))] * (sampling.n - n)

    async def _drawn(self, prompt: Prompt, sampling: Sampling, index: int, n: int, meter: Meter) -> list[Completion]:
        """Draw n samples, or fewer if the server returns fewer; the first has this index."""
        start = time.monotonic()
        path, body = address(prompt, self._options)
        body |= sampled(sampling, self._options, seed_of(sampling.seed, index), n, "messages" in body)
        exact = self._endpoint.server.is_tot and index == 0 and not self._options.thinking_tokens
        if exact:
            body = {name: value for name, value in body.items() if name != "logprobs"} | for_tot(prompt, sampling)
        messages = messages_of(prompt)
        prefix = messages[-1].content if path.startswith("/chat") and messages[-1].role == "assistant" else ""
        total = Usage()
        whole = "stop" not in body  # the client truncates the text
        try:
            if path.startswith("/chat") and (prefix or sampling.keep_stop) and not self._endpoint.server.is_tot:
                await self._try_continuing(sampling, meter)
            while True:
                whole = whole or (sampling.keep_stop and not exact and not self._dialect.tells_stops)
                if sampling.keep_stop and not exact:
                    body[KEEP_STOP] = True
                    if whole:
                        body = {name: value for name, value in body.items() if name not in ("stop", KEEP_STOP)}
                try:
                    reply, usage = await self._endpoint.ask(meter, path, body)
                    total += usage
                    usage = replace(total, seconds=time.monotonic() - start)
                    repeated = prefix if self._dialect.repeats or self._dialect.continues is False else ""
                    return samples_of(reply, sampling, self._options.logprobs, usage, not whole, repeated)
                except RefusedError:
                    if KEEP_STOP not in body or not self._dialect.keep_stop:
                        raise
                    self._dialect.keep_stop = False
                except UnknownEndError as unknown:
                    whole = True
                    if not unknown.blank:
                        self._dialect.tells_stops = False
                        self._endpoint.warn(
                            "this server does not report which stop string ended a text: texts are requested without "
                            "stop strings and truncated by the client, which uses more tokens"
                        )
        except SpentError:
            return [CUT] * n

    async def continues(self, meter: Meter) -> bool:
        """Return whether the server continues an assistant message, which is tested once."""
        async with self._trying:
            if self._dialect.continues is None:
                try:
                    reply, _ = await self._endpoint.ask(meter.for_probes(), *counting(self._options))
                    self._dialect.tried(*apart(reply.choices[0]))
                except RefusedError as error:
                    self._dialect.continues, self._dialect.instead = False, error.said
        return bool(self._dialect.continues)

    async def _try_continuing(self, sampling: Sampling, meter: Meter) -> None:
        """Warn if the server does not continue an assistant message.

        Raises OptionError if the samples must continue a message (`keep_stop`).
        """
        if await self.continues(meter):
            return
        problem = f"{self._options.base_url} does not continue an assistant message ({self._dialect.instead})"
        if sampling.keep_stop:
            raise OptionError(
                f"the server at {problem}, which generator=continue needs: use generator=sample, or vLLM, SGLang or "
                "tot serve"
            )
        self._endpoint.warn(f"{problem}: it starts a new reply instead")
