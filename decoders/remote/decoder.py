"""The `openai` decoder: requests to an OpenAI-compatible server (vLLM, SGLang, TGI, llama.cpp, `transformers serve`).

All requests of a call are sent concurrently, up to `concurrency`, so that the server can batch them and reuse common
prefixes. Token counts are the server's. Forward passes are not counted: a budget of them counts tokens.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from tot.decoders.budget import Meter
from tot.decoders.errors import OptionError, validated
from tot.decoders.remote.abilities import FILTERS, Abilities, probe
from tot.decoders.remote.body import Prompt, extended, seed_of
from tot.decoders.remote.choices import Choices, ServerTokens
from tot.decoders.remote.endpoint import Endpoint, SpentError
from tot.decoders.remote.loop import LoopThread, together
from tot.decoders.remote.options import KEY_VARIABLE, RemoteOptions
from tot.decoders.remote.reply import ServerReply
from tot.decoders.remote.sampler import Sampler
from tot.decoders.request import ChoiceLogprob, Completion, FinishReason, Part, Request, Sampling, Usage

if TYPE_CHECKING:
    from tot.decoders.remote.transport import Spent


_PROBED: dict[tuple[str, ...], Abilities] = {}
"""The abilities of servers probed in this process, by address, model, route and extra fields."""


class RemoteDecoder:
    """Sends requests for one model to one server. Usable from any thread and any event loop.

    At temperature 0, one sample is requested and repeated n times. A server that returns one sample per request gets n
    requests, sample i with the seed hash(seed, i). Seeds are reduced to 31 bits and `Completion.tokens` is empty,
    except with `tot serve`, which draws the same samples as the same decoder run locally.
    """

    name = "openai"

    def __init__(self, model: str, options: RemoteOptions) -> None:
        """Send nothing yet. Raises OptionError if the extra `openai` is not installed."""
        self.model = options.served or model
        """The model's name on the server."""
        self.options = options
        try:
            from tot.decoders.remote.server import Server
        except ModuleNotFoundError as error:
            raise OptionError(f"the openai decoder needs {error.name}: pip install openai") from None
        self._endpoint = Endpoint(Server(options, self.model))
        self._loop = LoopThread(self._endpoint.server.close)
        self._sampler = Sampler(self._endpoint)
        self._choices = Choices(options, ServerTokens(options, self._endpoint.tokenize))
        self._abilities: Abilities | None = None
        self._probing = asyncio.Lock()
        self.probes = False
        """Probe the server before the first request: set if it matters whether the server ignores seeds."""

    def __repr__(self) -> str:
        return f"RemoteDecoder({self.model!r}, base_url={self.options.base_url!r})"

    @property
    def chats(self) -> bool:
        """True if messages are sent to the chat route."""
        return self.options.api == "chat"

    @property
    def spent(self) -> Spent:
        """Requests, retries, tokens and cost so far."""
        return self._endpoint.server.spent

    def check(self) -> None:
        """Raise ModelError if the server does not answer or rejects the API key."""
        self._loop.wait(self._endpoint.server.check)

    @property
    def served_models(self) -> list[str]:
        """The models that the server listed when it was checked."""
        return self._endpoint.server.models

    def probe(self) -> Abilities:
        """Return the server's abilities for the model, and adapt to them. Probes each server and model once a process.

        Raises ModelError as in `start`.
        """
        return self._loop.wait(partial(self._probe, Meter()))

    def start(self, requests: Sequence[Request], meter: Meter | None = None) -> list[asyncio.Task[list[Completion]]]:
        """Start requests, counted on `meter` as replies arrive. Call this in an event loop.

        Completions that exceed the budget have no text and the finish reason "budget". A cancelled request delivers
        nothing: the server does not report its tokens. Awaiting raises RequestError if the server rejects a request,
        ModelError if it does not answer, rejects the API key or does not have the model.
        """
        meter = meter or Meter()
        return [asyncio.ensure_future(self._loop.when_done(partial(self._one, one, meter))) for one in requests]

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        """Return all completions in one list, blocking. Also works while an event loop is running."""
        results = self._loop.wait(partial(self._all, requests, Meter()))
        return [completion for completions in results for completion in completions]

    def close(self) -> None:
        """Cancel requests in flight and close all connections."""
        self._loop.close()

    def __enter__(self) -> RemoteDecoder:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    async def _all(self, requests: Sequence[Request], meter: Meter) -> list[list[Completion]]:
        return await together([partial(self._one, request, meter) for request in requests])

    async def _one(self, request: Request, meter: Meter) -> list[Completion]:
        sampling = request.sampling
        filters = [name for name in FILTERS if getattr(sampling, name) != Sampling.model_fields[name].default]
        if (self.probes or filters) and sampling.temperature:
            with suppress(SpentError):  # the request is cut, too
                found = await self._probe(meter)
                for name in filters:
                    if found.get(name) is False:
                        raise OptionError(f"the server of {self.model} ignores {name}: leave {name} out")
        if request.choices and request.answer_trigger is None:
            return [await self._scored(request.prompt, request, meter)]
        samples = await self._sampler.samples(request.prompt, request.sampling, meter)
        if request.answer_trigger is None:
            return samples
        return await together([partial(self._answered, request, i, sample, meter) for i, sample in enumerate(samples)])

    async def _probe(self, meter: Meter) -> Abilities:
        options = self.options
        place = (options.base_url, self.model, options.api, json.dumps(options.extra, sort_keys=True))
        async with self._probing:
            if self._abilities is None:
                limit = meter.for_probes()  # a token budget must not be spent by the probe
                known = _PROBED.get(place) or await probe(self._endpoint, self._sampler, self._choices, limit)
                self._abilities = _PROBED[place] = known
                self._endpoint.adapt(known)
            return self._abilities

    async def _answered(self, request: Request, index: int, rationale: Completion, meter: Meter) -> Completion:
        """Extend a rationale by the answer trigger, then by the answer or the choices' scores."""
        if rationale.finish_reason == "budget":
            return rationale
        trigger = request.answer_trigger
        assert trigger is not None
        begun = replace(rationale, text=rationale.text + trigger, parts=(*rationale.parts, Part("trigger", trigger)))
        prompt = extended(request.prompt, begun.text)
        if request.choices:
            return begun.then(await self._scored(prompt, request, meter))
        seed = seed_of(request.sampling.seed, index, "answer")
        sampling = request.sampling.model_copy(update={"max_tokens": request.answer_tokens, "seed": seed, "n": 1})
        (answer,) = await self._sampler.samples(prompt, sampling, meter)
        return begun.then(answer)

    async def _scored(self, prompt: Prompt, request: Request, meter: Meter) -> Completion:
        """Score a request's choices after a prompt; the scores are empty if the budget is spent first."""
        start = time.monotonic()
        usages: list[Usage] = []

        async def ask(path: str, body: dict[str, Any]) -> ServerReply:
            reply, usage = await self._endpoint.ask(meter, path, body)
            usages.append(usage)
            return reply

        scores: tuple[ChoiceLogprob, ...] = ()
        reason: FinishReason = "budget"
        with suppress(SpentError):
            scores, reason = await self._choices.score(prompt, request, ask), "stop"
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
    if options.served is None and not isinstance(model, str):
        raise OptionError("a server needs the name of a model, not a model object: give model=NAME or served=NAME")
    decoder = RemoteDecoder(str(model), options)
    try:
        decoder.check()
    except BaseException:
        decoder.close()
        raise
    return decoder
