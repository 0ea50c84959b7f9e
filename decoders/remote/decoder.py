"""The `openai` decoder: requests to an OpenAI-compatible server (vLLM, SGLang, TGI, llama.cpp, `transformers serve`).

All requests of a call go out together, as many at once as the options say, so that the server batches them and finds
their common prefixes. It computes nothing itself: no forwards are counted, so a budget of forwards ends nothing here,
and tokens are as the server counts them.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from tot.decoders.budget import Meter
from tot.decoders.errors import OptionError, RequestError, validated
from tot.decoders.remote.body import (
    KEEP_STOP,
    Dialect,
    Prompt,
    RefusedError,
    address,
    counting,
    extended,
    for_tot,
    messages_of,
    sampled,
    seed_of,
)
from tot.decoders.remote.choices import Choices, ServerTokens
from tot.decoders.remote.loop import LoopThread, together
from tot.decoders.remote.options import KEY_VARIABLE, RemoteOptions
from tot.decoders.remote.reply import Reply, apart
from tot.decoders.remote.samples import CUT, Sample, UnknownEndError, samples_of
from tot.decoders.request import ChoiceLogprob, Completion, FinishReason, Part, Request, Sampling, Usage

if TYPE_CHECKING:
    from tot.decoders.remote.transport import Spent

log = logging.getLogger(__name__)

_CHANCE = 20
"""Characters up to which samples may well be the same text."""
_LONG, _MOST_CHARACTERS = 4000, 20
"""Characters of a prompt that is checked for truncation, and the most that a token has on average."""


class RemoteDecoder:
    """Asks one server for one model. Use it from any thread and any event loop.

    At temperature 0 the n samples of a request are one, asked for once. A server that draws one sample at a time is
    asked n times, sample i by a seed of its own, hash(seed, i). Seeds are cut to 31 bits. Servers send text, so
    `Completion.tokens` is empty.
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
        self._server = Server(options, self.model)
        self._loop = LoopThread(self._server.close)
        self._dialect = Dialect()
        self._choices = Choices(options, ServerTokens(options, self._tokenize))
        self._slots = asyncio.Semaphore(options.concurrency)
        self._trying = asyncio.Lock()
        self._warned: set[str] = set()

    def __repr__(self) -> str:
        return f"RemoteDecoder({self.model!r}, base_url={self.options.base_url!r})"

    @property
    def chats(self) -> bool:
        """Whether messages are sent as a chat."""
        return self.options.api == "chat"

    @property
    def spent(self) -> Spent:
        """Requests, repetitions, tokens and cost so far."""
        return self._server.spent

    def check(self) -> None:
        """Raises ModelError where nothing answers at the address, or the key is refused."""
        self._loop.wait(self._server.check)

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
        samples = await self._samples(request.prompt, request.sampling, meter)
        if request.answer_trigger is None:
            return [_completion(sample, sample.parts) for sample in samples]
        return await together([partial(self._answered, request, i, sample, meter) for i, sample in enumerate(samples)])

    async def _answered(self, request: Request, index: int, rationale: Sample, meter: Meter) -> Completion:
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
        (answer,) = await self._samples(prompt, sampling, meter)
        whole = replace(
            answer,
            logprob=rationale.logprob + answer.logprob,
            logprobs=rationale.logprobs + answer.logprobs,
            tokens=rationale.tokens + answer.tokens,
            usage=rationale.usage + answer.usage,
        )
        return _completion(whole, (*before, *answer.parts))

    async def _samples(self, prompt: Prompt, sampling: Sampling, meter: Meter) -> list[Sample]:
        """n samples of a prompt."""
        n = sampling.n if sampling.temperature else 1
        done: list[Sample] = []
        if n == 1 or self._dialect.n:
            try:
                done = (await self._drawn(prompt, sampling, 0, n, meter))[:n]
            except RefusedError:  # in whatever words: perhaps it draws one sample a request
                if n == 1:
                    raise
                done = await self._drawn(prompt, sampling, 0, 1, meter)
        if len(done) < n:
            if done and done[0] is not CUT:  # it was asked for n, and gave one
                self._dialect.n = False
            rest = [partial(self._drawn, prompt, sampling, i, 1, meter) for i in range(len(done), n)]
            done += [samples[0] for samples in await together(rest)]
        if n > 2 and len({sample.text for sample in done}) == 1 and len(done[0].text) > _CHANCE:
            self._warn(
                "all %d samples at temperature %g are the same text: does this server cache its replies?",
                n,
                sampling.temperature,
            )
        return done + [replace(done[0], usage=Usage(seconds=done[0].usage.seconds))] * (sampling.n - n)

    async def _drawn(self, prompt: Prompt, sampling: Sampling, index: int, n: int, meter: Meter) -> list[Sample]:
        """Samples from `index` on, n of them if the server can."""
        began = time.monotonic()
        path, body = address(prompt, self.options)
        body |= sampled(sampling, self.options, seed_of(sampling.seed, index), n, "messages" in body)
        exact = self._server.is_tot and index == 0 and not self.options.thinking_tokens
        if exact:
            body = {name: value for name, value in body.items() if name != "logprobs"} | for_tot(prompt, sampling)
        messages = messages_of(prompt)
        prefix = messages[-1].content if path.startswith("/chat") and messages[-1].role == "assistant" else ""
        spent = Usage()
        whole = "stop" not in body
        try:
            if path.startswith("/chat") and (prefix or sampling.keep_stop) and not self._server.is_tot:
                await self._try_continuing(sampling, meter)
            while True:
                whole = whole or (sampling.keep_stop and not exact and not self._dialect.tells_stops)
                if sampling.keep_stop and not exact:
                    body[KEEP_STOP] = True
                    if whole:
                        body = {name: value for name, value in body.items() if name not in ("stop", KEEP_STOP)}
                try:
                    reply, used = await self._ask(meter, path, body)
                    spent += used
                    used = replace(spent, seconds=time.monotonic() - began)
                    repeated = prefix if self._dialect.repeats or self._dialect.continues is False else ""
                    return samples_of(reply, sampling, self.options.logprobs, used, not whole, repeated)
                except RefusedError:
                    if KEEP_STOP not in body or not self._dialect.keep_stop:
                        raise
                    self._dialect.keep_stop = False
                except UnknownEndError as unknown:
                    whole = True
                    if not unknown.blank:
                        self._dialect.tells_stops = False
                        self._warn(
                            "this server does not show which stop string ended a text: whole texts are asked for, "
                            "which takes more tokens, and cut here"
                        )
        except _SpentError:
            return [CUT] * n

    async def _try_continuing(self, sampling: Sampling, meter: Meter) -> None:
        """Find out once whether the server continues an assistant message. Raises OptionError where it does not, and
        the text is a piece of one, which it would answer anew each time."""
        async with self._trying:
            if self._dialect.continues is None:
                try:
                    reply, _ = await self._ask(meter, *counting(self.options))
                    self._dialect.tried(apart(reply.choices[0])[0])
                except RefusedError as error:
                    self._dialect.continues = False
                    self._warn("this server does not go on with an assistant message: %s", error.said)
        if sampling.keep_stop and not self._dialect.continues:
            raise OptionError(
                f"the server at {self.options.base_url} does not continue an assistant message, which "
                "generator=continue needs: use generator=sample, or vLLM, SGLang or tot serve"
            )

    def _warn(self, message: str, *about: object) -> None:
        """Log a warning, the first time."""
        if message not in self._warned:
            self._warned.add(message)
            log.warning(message, *about)

    async def _scored(self, prompt: Prompt, request: Request, meter: Meter) -> Completion:
        """The scores of a request's choices after a prompt; none where a budget ended it before."""
        began = time.monotonic()
        spent: list[Usage] = []

        async def ask(path: str, body: dict[str, Any]) -> Reply:
            reply, used = await self._ask(meter, path, body)
            spent.append(used)
            return reply

        scores: tuple[ChoiceLogprob, ...] = ()
        reason: FinishReason = "budget"
        with suppress(_SpentError):
            scores, reason = await self._choices.score(prompt, request, ask), "stop"
        usage = replace(sum(spent, Usage()), seconds=time.monotonic() - began)
        return Completion("", (), 0.0, reason, usage, scores, (Part("exact", ""),))

    async def _ask(self, meter: Meter, path: str, body: dict[str, Any]) -> tuple[Reply, Usage]:
        """The reply to a body, which is fitted to what the server takes, and what it took, which is counted.

        Raises _SpentError where the meter's budget is spent, RefusedError or ModelError.
        """
        async with self._slots:
            while True:
                if meter.overspent() is not None:
                    raise _SpentError
                if body.get("n", 1) > 1 and not self._dialect.n:
                    raise RefusedError("this server draws one sample a request", "n")
                sent = self._fitted(body)
                limit = meter.budget.seconds
                try:
                    async with asyncio.timeout(None if limit is None else limit - meter.seconds):
                        reply = await self._server.post(path, sent)
                    break
                except TimeoutError:
                    raise _SpentError from None
                except RefusedError as error:
                    # Others may have taught it while this one was under way.
                    if not self._dialect.learns(error.said, sent) and self._fitted(body) == sent:
                        raise
        used = self._usage(reply, body)
        meter.count(new_tokens=used.new_tokens)
        self.spent.usage += used
        return reply, used

    def _fitted(self, body: dict[str, Any]) -> dict[str, Any]:
        return {"model": self.model, **self._dialect.fitted(body), **self.options.extra}

    async def _tokenize(self, body: dict[str, Any]) -> tuple[int, ...]:
        async with self._slots:
            return await self._server.tokenize(body)

    def _usage(self, reply: Reply, body: dict[str, Any]) -> Usage:
        """The usage of a reply; nothing is known of one that does not say. Some servers count a token of an echo."""
        if reply.usage is None or reply.usage.completion_tokens is None:
            self._warn("%s does not say how many tokens its replies take: they are not counted", self)
        used = reply.usage
        prompt, new = (used.prompt_tokens or 0, used.completion_tokens or 0) if used is not None else (0, 0)
        characters = _characters(body)
        if characters > _LONG and 0 < prompt * _MOST_CHARACTERS < characters:
            self._warn(
                "%s counts %d prompt tokens in %d characters: it may have truncated the prompt",
                self,
                prompt,
                characters,
            )
        cached = min(prompt, (used.cached_tokens or 0) if used is not None else 0)
        cost = self.options.cost(prompt, cached, new)
        return Usage(prompt, cached, new if body["max_tokens"] else 0, cost=cost)


def _characters(body: dict[str, Any]) -> int:
    """The length of the prompt in a body; 0 for token ids."""
    prompt = body.get("prompt", "")
    texts = [message["content"] for message in body.get("messages", ())]
    return sum(map(len, texts)) + (len(prompt) if isinstance(prompt, str) else 0)


class _SpentError(Exception):
    """The budget has ended."""


def _completion(sample: Sample, parts: tuple[Part, ...]) -> Completion:
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
