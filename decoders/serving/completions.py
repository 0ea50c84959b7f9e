"""Completions by the decoding methods of one model, selected by name.

All methods share one engine, so the requests of all clients are decoded in the same packed forward passes. A request
is cancelled, which frees its slots, when its caller stops waiting.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from tot.decoders.budget import Budget, Meter
from tot.decoders.decoder import LocalDecoder, find_method, load_decoder, method_names
from tot.decoders.engine.sequence import Call, Handle
from tot.decoders.errors import ContextError
from tot.decoders.remote.loop import together
from tot.decoders.request import Completion, Request, Sampling, Usage
from tot.decoders.serving.errors import ServingError
from tot.decoders.serving.gate import Gate, closing, late
from tot.decoders.serving.limits import Limits
from tot.decoders.serving.metrics import ServerMetrics
from tot.decoders.serving.protocol import ChatBody, TextBody, requests_of
from tot.decoders.serving.replies import CompletionReply
from tot.decoders.serving.scoring import Scored, TextScoring
from tot.decoders.serving.service import Emit

_BODIES: Mapping[str, type[ChatBody | TextBody]] = {"/v1/chat/completions": ChatBody, "/v1/completions": TextBody}


class DecodingMethods:
    """Serves a decoder as `name`, and each method as `name:method`, created at its first request.

    Each method gets the `options` that it has. The caller closes the decoder. `sampling` has the model's own
    temperature and filters.
    """

    paths: Collection[str] = tuple(_BODIES)

    def __init__(
        self,
        name: str,
        decoder: LocalDecoder,
        limits: Limits,
        options: Mapping[str, Any] | None = None,
        sampling: Mapping[str, float] | None = None,
    ) -> None:
        self.gate = Gate(limits.concurrency, limits)
        self.limits = limits
        self.engine = decoder.engine
        methods = {name: decoder.name, **{f"{name}:{method}": method for method in method_names()}}
        self.models: Mapping[str, Mapping[str, Any]] = {
            model: {"tot": {"decoder": method}} for model, method in methods.items()
        }
        self._methods = methods
        self._options = dict(options or {})
        self._sampling = dict(sampling or {})
        self._decoders = {decoder.name: decoder}
        self._created = ExitStack()
        self._creating = threading.Lock()

    @property
    def failed(self) -> str | None:
        """The error of a failed engine; None while it works."""
        return None if self.engine.failed is None else str(self.engine.failed)

    def watch(self, metrics: ServerMetrics) -> None:
        metrics.watch_gate("requests", self.gate)
        metrics.watch_engine(self.engine)

    def work(self, path: str, body: bytes, client: str) -> Decoding:
        """Read a request. Raises ServingError, or pydantic's ValidationError if the body is invalid."""
        read = _BODIES[path].model_validate_json(body)
        method = self._methods[read.model]
        requests = requests_of(read, method, self.limits, self._sampling)
        reply = CompletionReply(read, method, requests, self.engine.codec)
        return Decoding(self, read, method, requests, reply, client)

    def close(self) -> None:
        """Close all decoders created by this object."""
        self._created.close()

    def decoder(self, method: str) -> LocalDecoder:
        """Return the decoder of a method, created on demand. It may take seconds: call it in a thread."""
        if method not in self._decoders:
            with self._creating:
                if method not in self._decoders:
                    fields = find_method(method).options.model_fields
                    options = {key: value for key, value in self._options.items() if key in fields}
                    decoder = load_decoder(method, engine=self.engine, **options)
                    self._decoders[method] = self._created.enter_context(decoder)
        return self._decoders[method]


@asynccontextmanager
async def _submitted(submit: Callable[[], list[Handle]]) -> AsyncIterator[list[Handle]]:
    """Yield the handles from `submit`, which runs in a thread because it tokenizes. Cancels unfinished ones."""
    submitting = asyncio.ensure_future(asyncio.to_thread(submit))
    try:
        yield await asyncio.shield(submitting)
    finally:
        submitting.add_done_callback(_cancel_handles)  # when the thread has ended, also if this task is cancelled


def _cancel_handles(submitting: asyncio.Future[list[Handle]]) -> None:
    if not submitting.cancelled() and submitting.exception() is None:
        for handle in submitting.result():
            if not handle.future.done():
                handle.cancel()


@dataclass(frozen=True, slots=True)
class Decoding:
    """The work of one HTTP request: one decoder request per prompt, all decoded by the same method."""

    source: DecodingMethods
    body: ChatBody | TextBody
    method: str
    requests: Sequence[Request]
    reply: CompletionReply
    client: str

    @property
    def stream(self) -> bool:
        return self.body.stream

    def failed(self, error: ServingError) -> dict[str, Any]:
        """Return the last event of a stream that fails."""
        return error.body()

    async def run(self, emit: Emit, metrics: ServerMetrics) -> None:
        """Decode the completions, and score them if logprobs are requested."""
        body = self.body
        async with self.source.gate.passed(self.client) as seconds:
            meter = Meter(Budget(seconds=seconds))
            completions, prompts, scored = await self._decoded(emit, meter)
        metrics.spent(completion.usage for samples in completions for completion in samples)
        if not self.stream:
            emit(self.reply.whole(completions, meter.forwards, prompts, scored))
            return
        if body.includes_usage:
            emit(self.reply.usage(completions, meter.forwards))
        emit("[DONE]")

    async def _decoded(
        self, emit: Emit, meter: Meter
    ) -> tuple[list[list[Completion]], list[list[int]], list[list[Scored]]]:
        """Return the completions of each prompt and, if they are echoed or scored, the prompts' tokens and scores."""
        body, source = self.body, self.source
        prompts: list[list[int]] = []
        if body.echo or body.alternatives is not None:
            encode = source.engine.codec.encode_prompt
            prompts = await asyncio.to_thread(lambda: [encode(request.prompt) for request in self.requests])
        completions = [[_empty_completion(ids)] for ids in prompts]
        if body.max_tokens != 0 or self.requests[0].choices:

            def submit() -> list[Handle]:
                return source.decoder(self.method).submit(self.requests, meter, self.stream)

            async with _submitted(submit) as handles:
                streams = [partial(self._sent, emit, i, handle) for i, handle in enumerate(handles)]
                completions = await together(streams)
            self._check(completions)
        scored = []
        if body.alternatives is not None:
            scored = [
                [self._to_score(ids, completion) for completion in samples]
                for ids, samples in zip(prompts, completions, strict=True)
            ]
            await self._score(prompts, scored, meter)
        return completions, prompts, scored

    async def _sent(self, emit: Emit, i: int, handle: Handle) -> list[Completion]:
        """Return the completions of prompt `i`, and emit the events of a stream."""
        first = i * self.requests[i].sampling.n
        if self.stream:
            async for sample, text in handle:
                for event in self.reply.piece(first + sample, text):
                    emit(event)
        completions = await handle
        if self.stream:
            self._check([completions])
            for sample, completion in enumerate(completions):
                for event in self.reply.ending(first + sample, completion):
                    emit(event)
        return completions

    def _check(self, completions: Sequence[Sequence[Completion]]) -> None:
        """Raise ServingError if a stop of the server cancelled a completion, or the time limit left no tokens."""
        samples = [sample for one in completions for sample in one]
        reasons = {sample.finish_reason for sample in samples}
        if "cancelled" in reasons:
            raise closing()
        if "budget" in reasons and not any(sample.tokens for sample in samples):
            raise late(self.source.limits)

    def _to_score(self, prompt: list[int], completion: Completion) -> Scored:
        """Return the tokens of a completion and, with `echo`, of its prompt, whose first token is not scored."""
        if not self.body.echo:
            return Scored(list(completion.tokens), 0)
        context = self.source.engine.runner.context
        if len(prompt) + len(completion.tokens) > context:
            tokens = f"the prompt has {len(prompt)} tokens and the model's context holds {context}"
            raise ContextError(f"{tokens}: shorten the prompt")
        return Scored([*prompt, *completion.tokens], 1)

    async def _score(self, prompts: list[list[int]], scored: list[list[Scored]], meter: Meter) -> None:
        """Fill in the logprobs of the tokens."""
        engine = self.source.engine
        calls = []
        for ids, texts in zip(prompts, scored, strict=True):
            for text in texts:
                if len(text.tokens) > text.unscored:
                    head = tuple(text.tokens[: text.unscored] or ids)
                    request = Request(prompt=head, sampling=Sampling(max_tokens=1), purpose="evaluate")
                    policy = partial(TextScoring, text=text, top=self.body.alternatives or 0)
                    calls.append(Call(request, policy, Handle(engine.wake, stream=False)))

        def submit() -> list[Handle]:
            engine.submit_all(calls, meter)
            return [call.handle for call in calls]

        async with _submitted(submit) as handles:
            self._check([await handle for handle in handles])


def _empty_completion(prompt: list[int]) -> Completion:
    return Completion("", (), 0.0, "length", Usage(prompt_tokens=len(prompt)))
