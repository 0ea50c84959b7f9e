"""Serve one model with its decoding methods, selected by name.

All methods share one engine, so the requests of all clients are decoded in the same packed forward passes. A request
is cancelled, which frees its slots, when its caller stops waiting.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Collection, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from starlette.requests import Request as HTTPRequest
from starlette.responses import Response

from tot.decoders.budget import Budget, Meter
from tot.decoders.decoder import LocalDecoder, find_method, load_decoder, method_names
from tot.decoders.engine.sequence import Handle
from tot.decoders.errors import ContextError, unknown
from tot.decoders.request import Completion, Request, Sampling, Usage
from tot.decoders.serving.errors import ServingError
from tot.decoders.serving.gate import Gate, closing, late
from tot.decoders.serving.options import Limits
from tot.decoders.serving.scoring import Scored, Scoring
from tot.decoders.serving.wire import Asked, ChatWanted, TextWanted

if TYPE_CHECKING:
    from tot.decoders.engine.engine import Engine
    from tot.decoders.remote.decoder import RemoteDecoder
    from tot.decoders.serving.prometheus import PrometheusMetrics


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of one HTTP request: the n completions of each prompt, and the number of forward passes."""

    completions: list[list[Completion]]
    forwards: int
    prompts: list[list[int]] = field(default_factory=list)
    """Token ids of the prompts, if they are echoed or scored."""
    scored: list[list[Scored]] = field(default_factory=list)


class Searches(Protocol):
    """Models that answer chats by a search."""

    gate: Gate

    @property
    def models(self) -> Collection[str]:
        """The names of the models."""

    async def reply(self, request: HTTPRequest, body: bytes, metrics: PrometheusMetrics) -> Response:
        """Answer a chat, or a request of the Responses API."""

    def cancel_all(self) -> None:
        """Cancel all running searches."""


class Service:
    """Serves `decoder` as `name`, each method as `name:method`, created at its first request, and `searches`.

    Each method gets the `options` that it has. A remote decoder has no methods. The caller closes the decoder.
    `sampling` has the model's own temperature and filters. With `hidden`, methods are served, but not listed.
    """

    def __init__(
        self,
        name: str,
        decoder: LocalDecoder | RemoteDecoder,
        limits: Limits | None = None,
        options: Mapping[str, Any] | None = None,
        searches: Searches | None = None,
        sampling: Mapping[str, float] | None = None,
        hidden: bool = False,
    ) -> None:
        self.name = name
        self.sampling = sampling
        self._hidden = hidden
        self.limits = limits or Limits()
        self.gate = Gate(self.limits.concurrency, self.limits)
        self.searches = searches
        self.gates = {"requests": self.gate, **({"searches": searches.gate} if searches else {})}
        self.default = decoder.name
        self._options = dict(options or {})
        self._decoders = {decoder.name: decoder} if isinstance(decoder, LocalDecoder) else {}
        self.methods = method_names() if self._decoders else []
        self._pending: dict[str, asyncio.Future[LocalDecoder]] = {}
        self._active: set[Handle] = set()

    @property
    def engine(self) -> Engine:
        return self._decoders[self.default].engine

    @property
    def failed(self) -> str | None:
        """The error of a failed engine; None while it works."""
        return str(self.engine.failed) if self.methods and self.engine.failed else None

    @property
    def models(self) -> list[str]:
        """Model names that a client may use."""
        searches = self.searches.models if self.searches else ()
        return list(dict.fromkeys([self.name, *(f"{self.name}:{method}" for method in self.methods), *searches]))

    @property
    def listed(self) -> list[str]:
        """Model names that /v1/models lists."""
        return [model for model in self.models if not self._hidden or model == self.name or not self.decodes(model)]

    def decodes(self, model: str) -> bool:
        """Return whether a model is a decoding method, not a search. Raises ServingError if its name is unknown."""
        if model not in self.models:
            raise ServingError(404, unknown("model", model, self.models), "model", "model_not_found")
        return bool(self.methods) and (model == self.name or model.removeprefix(f"{self.name}:") in self.methods)

    def method(self, model: str) -> str:
        """Return the decoding method for a model's name. Raises ServingError if it has none."""
        if not self.decodes(model):
            message = f"{model} is a search and answers chats: use /v1/chat/completions or /v1/responses"
            raise ServingError(400, message, "model")
        return model.removeprefix(self.name).removeprefix(":") or self.default

    async def complete(self, asked: Asked) -> Outcome:
        """Decode the completions of a request, and score them if logprobs are requested."""
        async with self.admitted(asked) as meter:
            prompts: list[list[int]] = []
            if asked.wanted.echo or asked.wanted.alternatives is not None:
                encode = self.engine.codec.encode_prompt
                prompts = await asyncio.to_thread(lambda: [encode(request.prompt) for request in asked.requests])
            completions = [[_empty_completion(ids)] for ids in prompts]
            if asked.wanted.draws:
                async with self.submitted(asked, meter) as handles:
                    completions = [await handle for handle in handles]
                self.check(completions)
            scored = []
            if asked.wanted.alternatives is not None:
                scored = await self._scored(asked.wanted, prompts, completions, meter)
            return Outcome(completions, meter.forwards, prompts, scored)

    @asynccontextmanager
    async def admitted(self, asked: Asked) -> AsyncIterator[Meter]:
        """Hold a slot of the gate and yield a meter whose budget is the remaining time limit."""
        async with self.gate.passed(asked.client) as seconds:
            yield Meter(Budget(seconds=max(0.0, seconds)))

    @asynccontextmanager
    async def submitted(self, asked: Asked, meter: Meter, stream: bool = False) -> AsyncIterator[list[Handle]]:
        """Submit the requests and yield their handles. Unfinished requests are cancelled on exit."""
        decoder = await self._decoder(asked.decoder)
        async with self._submitted(partial(decoder.submit, asked.requests, meter, stream)) as handles:
            yield handles

    def check(self, done: list[list[Completion]]) -> None:
        """Raise ServingError if a stop of the server cancelled a completion, or the time limit left no tokens."""
        reasons = {completion.finish_reason for completions in done for completion in completions}
        if "cancelled" in reasons:
            raise closing()
        if "budget" in reasons and not any(completion.tokens for completions in done for completion in completions):
            raise late(self.limits)

    def cancel_all(self) -> None:
        """Cancel all running requests at the next step, and all searches."""
        for handle in [*self._active]:
            handle.cancel()
        if self.searches is not None:
            self.searches.cancel_all()

    def close(self) -> None:
        """Close all decoders created by this service."""
        for name, decoder in self._decoders.items():
            if name != self.default:
                decoder.close()

    async def _decoder(self, name: str) -> LocalDecoder:
        """Return the decoder of a method, created on demand. A disconnect of the client does not stop its creation."""
        if name in self._decoders:
            return self._decoders[name]
        if name not in self._pending:
            self._pending[name] = loading = asyncio.ensure_future(asyncio.to_thread(self._set_up, name))
            loading.add_done_callback(partial(self._on_loaded, name))
        return await asyncio.shield(self._pending[name])

    def _on_loaded(self, name: str, loading: asyncio.Future[LocalDecoder]) -> None:
        del self._pending[name]
        if not loading.cancelled() and loading.exception() is None:
            self._decoders[name] = loading.result()

    def _set_up(self, name: str) -> LocalDecoder:
        fields = find_method(name).options.model_fields
        options = {key: value for key, value in self._options.items() if key in fields}
        return load_decoder(name, engine=self.engine, **options)

    @asynccontextmanager
    async def _submitted(self, submit: Callable[[], list[Handle]]) -> AsyncIterator[list[Handle]]:
        """Yield the handles from `submit`, which runs in a thread because it tokenizes."""
        submitting = asyncio.ensure_future(asyncio.to_thread(submit))
        try:
            handles = await asyncio.shield(submitting)
        except asyncio.CancelledError:  # the thread still runs: cancel its handles
            submitting.add_done_callback(_cancel_handles)
            raise
        self._active.update(handles)
        try:
            yield handles
        finally:
            self._active.difference_update(handles)
            for handle in handles:
                if not handle.future.done():
                    handle.cancel()

    async def _scored(
        self, wanted: ChatWanted | TextWanted, prompts: list[list[int]], done: list[list[Completion]], meter: Meter
    ) -> list[list[Scored]]:
        """Return the logprobs of each completion's tokens and, with `echo`, of its prompt's tokens."""
        scored = [
            [self._to_score(ids, list(completion.tokens), wanted.echo) for completion in completions]
            for ids, completions in zip(prompts, done, strict=True)
        ]
        heads, policies = [], []
        for ids, texts in zip(prompts, scored, strict=True):
            for text in texts:
                if len(text.tokens) == text.unscored:
                    continue
                head = tuple(text.tokens[: text.unscored] or ids)
                heads.append(Request(prompt=head, sampling=Sampling(max_tokens=1), purpose="evaluate"))
                policies.append(partial(Scoring, text=text, top=wanted.alternatives or 0))
        async with self._submitted(partial(self.engine.submit_all, heads, policies, meter)) as handles:
            self.check([await handle for handle in handles])
        return scored

    def _to_score(self, prompt: list[int], drawn: list[int], echo: bool) -> Scored:
        if not echo:
            return Scored(drawn, 0)
        if len(prompt) + len(drawn) > self.engine.runner.context:
            raise ContextError(
                f"the prompt has {len(prompt)} tokens and the model's context holds {self.engine.runner.context}: "
                "shorten the prompt"
            )
        return Scored([*prompt, *drawn], 1)


def _empty_completion(prompt: list[int]) -> Completion:
    return Completion("", (), 0.0, "length", Usage(prompt_tokens=len(prompt)))


def _cancel_handles(submitting: asyncio.Future[list[Handle]]) -> None:
    if not submitting.cancelled() and submitting.exception() is None:
        for handle in submitting.result():
            handle.cancel()
