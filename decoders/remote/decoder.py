"""The `openai` decoder: requests to a server with OpenAI's protocol (vLLM, SGLang, llama-server, Ollama, `tot serve`).

All requests of a call are sent concurrently, up to `concurrency`, so that the server can batch them and reuse common
prefixes. Token counts are the server's. Forward passes are not counted: a budget of them counts tokens.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

from tot.decoders.budget import Meter
from tot.decoders.errors import OptionError, validated
from tot.decoders.remote.body import Prompt, changed, extended, seed_of
from tot.decoders.remote.choices import Choices
from tot.decoders.remote.loop import LoopThread, together
from tot.decoders.remote.options import KEY_VARIABLE, RemoteOptions
from tot.decoders.remote.reply import ServerReply
from tot.decoders.remote.sampler import Sampler, SpentError
from tot.decoders.remote.servers import Server
from tot.decoders.request import ChoiceLogprob, Completion, FinishReason, Part, Request, Sampling, ToolCall, Usage
from tot.decoders.tools import TAGGED


class RemoteDecoder:
    """Sends requests for one model to one server. Usable from any thread and any event loop.

    At temperature 0, one sample is requested and repeated n times. A server that returns one sample per request gets n
    requests, sample i with the seed hash(seed, i). Seeds are reduced to 31 bits and `Completion.tokens` is empty,
    except with `tot serve`, which draws the same samples as the same decoder run locally.
    """

    name = "openai"
    chats = True
    """Messages get the server's chat template."""

    def __init__(self, model: str, options: RemoteOptions) -> None:
        """Send nothing yet. Raises OptionError if the API key or a proxy in the environment is invalid."""
        self.model = model
        """The model's name on the server."""
        self.options = options
        from tot.decoders.remote.client import Client  # imports httpx, which takes time

        self._client = Client(options, model)
        self._sampler = Sampler(self._client)
        self._choices = Choices(self._sampler)
        self._loop = LoopThread(self._client.close)

    def __repr__(self) -> str:
        return f"RemoteDecoder({self.model!r}, base_url={self.options.base_url!r})"

    def check(self) -> None:
        """Raise ModelError if the server does not answer or rejects the API key."""
        self._loop.wait(self._client.check)

    @property
    def served_models(self) -> list[str]:
        """The models that the server listed when it was checked."""
        return self._client.models

    @property
    def server(self) -> Server:
        """The kind of server, found when it was checked."""
        return self._client.server

    def start(self, requests: Sequence[Request], meter: Meter | None = None) -> list[asyncio.Future[list[Completion]]]:
        """Start requests, counted on `meter` as replies arrive. Call this in an event loop.

        Completions that exceed the budget have no text and the finish reason "budget". A cancelled request delivers
        nothing: the server does not report its tokens. Awaiting raises RequestError if the server rejects a request,
        ModelError if it does not answer, rejects the API key or does not have the model.
        """
        meter = meter or Meter()
        return [asyncio.wrap_future(self._loop.submit(partial(self._one, one, meter))) for one in requests]

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        """Return all completions in one list, blocking. Also works while an event loop is running."""
        meter = Meter()
        results = self._loop.wait(partial(together, [partial(self._one, one, meter) for one in requests]))
        return [completion for completions in results for completion in completions]

    def read_calls(self, completion: Completion) -> tuple[str, list[ToolCall]]:
        """Return the text before the calls in a completion of a request with tools, and the calls, with new ids."""
        return TAGGED.parse(completion.text)

    def close(self) -> None:
        """Cancel requests in flight and close all connections."""
        self._loop.close()

    def __enter__(self) -> RemoteDecoder:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    async def _one(self, request: Request, meter: Meter) -> list[Completion]:
        """Return the completions of one request."""
        if request.choices and request.answer_trigger is None:
            return [await self._scored(request.prompt, request, meter)]
        constraint = request.constraint if request.answer_trigger is None else None  # of the answer
        samples = await self._sampler.samples(request.model_copy(update={"constraint": constraint}), meter)
        return await together([partial(self._answered, request, i, sample, meter) for i, sample in enumerate(samples)])

    async def _answered(self, request: Request, index: int, rationale: Completion, meter: Meter) -> Completion:
        """Extend a rationale by the answer trigger, if any, then by the answer or the choices' scores."""
        trigger = request.answer_trigger
        if trigger is None or rationale.finish_reason == "budget":
            return rationale
        begun = replace(rationale, text=rationale.text + trigger, parts=(*rationale.parts, Part("trigger", trigger)))
        prompt = extended(request.prompt, begun.text)
        if request.choices:
            return begun.then(await self._scored(prompt, request, meter))
        seed = seed_of(request.sampling.seed, index, "answer")
        sampling = request.sampling.model_copy(update={"max_tokens": request.answer_tokens, "seed": seed, "n": 1})
        (answer,) = await self._sampler.samples(changed(request, prompt, sampling), meter)
        return begun.then(answer)

    async def _scored(self, prompt: Prompt, request: Request, meter: Meter) -> Completion:
        """Score a request's choices after a prompt; the scores are empty if the budget is spent first."""
        start = time.monotonic()
        usages: list[Usage] = []

        async def ask(path: str, body: dict[str, Any]) -> ServerReply:
            reply, usage = await self._sampler.ask(meter, path, body)
            usages.append(usage)
            return reply

        async def write(sampling: Sampling) -> str:
            (written,) = await self._sampler.samples(changed(request, prompt, sampling), meter)
            usages.append(written.usage)
            if written.finish_reason == "budget":
                raise SpentError
            return written.text

        scores: tuple[ChoiceLogprob, ...] = ()
        reason: FinishReason = "budget"
        with suppress(SpentError):
            scores, reason = await self._choices.score(changed(request, prompt), ask, write), "stop"
        usage = replace(sum(usages, Usage()), seconds=time.monotonic() - start)
        return Completion("", (), 0.0, reason, usage, scores, (Part("exact", ""),))


def open_remote(model: Any, given: dict[str, Any]) -> RemoteDecoder:
    """Open a decoder for a model's name, with options by name, and check that the server answers.

    Raises:
        OptionError: An option is unknown or invalid.
        ModelError: The server does not answer.
    """
    if "api_key" in given or "key" in given:
        raise OptionError(f"the API key is not an option, as options are saved to files: set {KEY_VARIABLE}")
    options = validated(RemoteOptions, given, "decoder openai")
    if not isinstance(model, str):
        raise OptionError("a server needs the name of a model, not a model object: give model=NAME")
    decoder = RemoteDecoder(model, options)
    try:
        decoder.check()
    except BaseException:
        decoder.close()
        raise
    return decoder
