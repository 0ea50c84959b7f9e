"""The `openai` decoder: requests to an OpenAI-compatible server (vLLM, SGLang, TGI, llama.cpp, `transformers serve`).

All requests of a call go out together, as many at once as the options say, so that the server batches them and finds
their common prefixes. It computes nothing itself: no forwards are counted, so a budget of forwards ends nothing here,
and tokens are as the server counts them.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from tot.decoders.budget import Meter
from tot.decoders.errors import OptionError, RequestError, validated
from tot.decoders.remote.body import Prompt, extended, seed_of
from tot.decoders.remote.choices import Choices, ServerTokens
from tot.decoders.remote.endpoint import Endpoint, SpentError
from tot.decoders.remote.loop import LoopThread, together
from tot.decoders.remote.options import KEY_VARIABLE, RemoteOptions
from tot.decoders.remote.reply import ServerReply
from tot.decoders.remote.sampler import Sampler
from tot.decoders.remote.samples import RemoteSample
from tot.decoders.request import ChoiceLogprob, Completion, FinishReason, Part, Request, Usage

if TYPE_CHECKING:
    from tot.decoders.remote.transport import Spent


class RemoteDecoder:
    """Asks one server for one model. Use it from any thread and any event loop.

    At temperature 0 the n samples of a request are one, asked for once. A server that draws one sample at a time is
    asked n times, sample i by a seed of its own, hash(seed, i). Seeds are cut to 31 bits, and servers send text, so
    `Completion.tokens` is empty; except `tot serve`, which draws what the same decoder draws here.
    """

    name = "openai"

    def __init__(self, model: str, options: RemoteOptions) -> None:
        """Asks nothing yet. Raises OptionError where the extra `openai` is not installed."""
        self.model = options.served or model
        """The model's name at the server."""
        self.options = options
        try:
            from tot.decoders.remote.server import Server
        except ModuleNotFoundError as error:
            raise OptionError(f"the openai decoder needs {error.name}: pip install openai") from None
        self._endpoint = Endpoint(Server(options, self.model))
        self._loop = LoopThread(self._endpoint.server.close)
        self._sampler = Sampler(self._endpoint)
        self._choices = Choices(options, ServerTokens(options, self._endpoint.tokenize))

    def __repr__(self) -> str:
        return f"RemoteDecoder({self.model!r}, base_url={self.options.base_url!r})"

    @property
    def chats(self) -> bool:
        """Whether messages are sent as a chat."""
        return self.options.api == "chat"

    @property
    def spent(self) -> Spent:
        """Requests, repetitions, tokens and cost so far."""
        return self._endpoint.server.spent

    def check(self) -> None:
        """Raises ModelError where nothing answers at the address, or the key is refused."""
        self._loop.wait(self._endpoint.server.check)

    async def complete(self, requests: Sequence[Request], meter: Meter | None = None) -> list[list[Completion]]:
        """The n completions of each request, counted on `meter` as replies come. Cancelled, or where one fails, it
        drops those in flight. What a budget leaves no room for ends as "budget", without text.

        Raises RequestError for what the server faults, ModelError where it does not answer, refuses the key or has no
        such model.
        """
        return await self._loop.when_done(partial(self._all, requests, meter or Meter()))

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        """The same, flat; also where an event loop is running."""
        done = self._loop.wait(partial(self._all, requests, Meter()))
        return [completion for completions in done for completion in completions]

    def close(self) -> None:
        """Drop what is in flight and let go of all connections."""
        self._loop.close()

    def __enter__(self) -> RemoteDecoder:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    async def _all(self, requests: Sequence[Request], meter: Meter) -> list[list[Completion]]:
        return await together([partial(self._one, request, meter) for request in requests])

    async def _one(self, request: Request, meter: Meter) -> list[Completion]:
        if request.states:
            raise RequestError(
                f"a server tells no hidden states, and {self.model} runs at one: ask a model that runs here"
            )
        if request.choices and request.answer_trigger is None:
            return [await self._scored(request.prompt, request, meter)]
        samples = await self._sampler.samples(request.prompt, request.sampling, meter)
        if request.answer_trigger is None:
            return [_completion(sample, sample.parts) for sample in samples]
        return await together([partial(self._answered, request, i, sample, meter) for i, sample in enumerate(samples)])

    async def _answered(self, request: Request, index: int, rationale: RemoteSample, meter: Meter) -> Completion:
        """A rationale, then the trigger, then the answer or the choices' scores."""
        if rationale.finish_reason == "budget":
            return _completion(rationale, rationale.parts)
        assert request.answer_trigger is not None
        prompt = extended(request.prompt, rationale.text + request.answer_trigger)
        before = (*rationale.parts, Part("trigger", request.answer_trigger))
        if request.choices:
            scored = await self._scored(prompt, request, meter)
            parts = (*before, Part("exact", ""))
            return replace(
                _completion(rationale, parts),
                finish_reason=scored.finish_reason,
                usage=rationale.usage + scored.usage,
                choice_logprobs=scored.choice_logprobs,
            )
        seed = seed_of(request.sampling.seed, index, "answer")
        sampling = request.sampling.model_copy(update={"max_tokens": request.answer_tokens, "seed": seed, "n": 1})
        (answer,) = await self._sampler.samples(prompt, sampling, meter)
        whole = replace(
            answer,
            logprob=rationale.logprob + answer.logprob,
            logprobs=rationale.logprobs + answer.logprobs,
            tokens=rationale.tokens + answer.tokens,
            usage=rationale.usage + answer.usage,
        )
        return _completion(whole, (*before, *answer.parts))

    async def _scored(self, prompt: Prompt, request: Request, meter: Meter) -> Completion:
        """The scores of a request's choices after a prompt; none where a budget ended it before."""
        began = time.monotonic()
        spent: list[Usage] = []

        async def ask(path: str, body: dict[str, Any]) -> ServerReply:
            reply, used = await self._endpoint.ask(meter, path, body)
            spent.append(used)
            return reply

        scores: tuple[ChoiceLogprob, ...] = ()
        reason: FinishReason = "budget"
        with suppress(SpentError):
            scores, reason = await self._choices.score(prompt, request, ask), "stop"
        usage = replace(sum(spent, Usage()), seconds=time.monotonic() - began)
        return Completion("", (), 0.0, reason, usage, scores, (Part("exact", ""),))


def _completion(sample: RemoteSample, parts: tuple[Part, ...]) -> Completion:
    text = "".join(part.text for part in parts if part.kind != "thinking")
    return Completion(
        text, sample.tokens, sample.logprob, sample.finish_reason, sample.usage, parts=parts, logprobs=sample.logprobs
    )


def open_remote(model: Any, given: dict[str, Any]) -> RemoteDecoder:
    """A decoder for a model's name, with options by name; it has been seen that something answers.

    Raises OptionError for an option that is not known or can't be taken, and ModelError where nothing answers.
    """
    if "api_key" in given or "key" in given:
        raise OptionError(f"the key is no option, lest it be kept in files: set the environment's {KEY_VARIABLE}")
    options = validated(RemoteOptions, given, "decoder openai")
    if options.served is None and not isinstance(model, str):
        raise OptionError("a server is asked for a model by name: give model=NAME, or served=NAME")
    decoder = RemoteDecoder(str(model), options)
    try:
        decoder.check()
    except BaseException:
        decoder.close()
        raise
    return decoder
