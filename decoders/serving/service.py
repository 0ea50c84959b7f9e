"""Service: one model, its decoding methods by name, and requests on their way through them.

All methods share one engine, so requests of all clients are decoded in the same packed forwards. Whoever stops waiting
for a request has it cancelled, which frees its slots. Knows no HTTP but the statuses of what it refuses.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from tot.decoders.budget import Budget, Meter
from tot.decoders.decoder import LocalDecoder, find_method, load_decoder, method_names
from tot.decoders.engine.sequence import Handle
from tot.decoders.errors import ModelError, RequestError, unknown
from tot.decoders.request import Completion, Request, Sampling, Usage
from tot.decoders.serving.errors import ServingError
from tot.decoders.serving.gate import Gate, closing, late
from tot.decoders.serving.options import Limits
from tot.decoders.serving.scoring import Scored, Scoring
from tot.decoders.serving.wire import Asked, ChatWanted, TextWanted


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one HTTP request: by prompt, its n completions; and what it cost."""

    completions: list[list[Completion]]
    forwards: int
    prompts: list[list[int]] = field(default_factory=list)
    """Their token ids, where they are told again or scored."""
    scored: list[list[Scored]] = field(default_factory=list)


class Service:
    """Serves `decoder` under `name`, and as `name:method` each method, set up when first asked for.

    `options` are for those methods that have them. The decoder is its owner's to close.
    """

    def __init__(
        self, name: str, decoder: LocalDecoder, limits: Limits | None = None, options: Mapping[str, Any] | None = None
    ) -> None:
        self.name = name
        self.limits = limits or Limits()
        self.gate = Gate(self.limits)
        self.default = decoder.name
        self.engine = decoder.engine
        self.failed: str | None = None
        """Why the engine runs no more, if so."""
        self._options = dict(options or {})
        self._decoders = {decoder.name: decoder}
        self._setting_up: dict[str, asyncio.Future[LocalDecoder]] = {}
        self._active: set[Handle] = set()

    @property
    def models(self) -> list[str]:
        """The names that a client may ask for."""
        return [self.name, *(f"{self.name}:{method}" for method in method_names())]

    def method(self, model: str) -> str:
        """The decoding method that a model's name stands for. Raises ServingError."""
        if model not in self.models:
            raise ServingError(404, unknown("model", model, self.models), "model", "model_not_found")
        return model.removeprefix(self.name).removeprefix(":") or self.default

    async def complete(self, asked: Asked) -> Outcome:
        """Decode whole texts, and score them where that is asked for."""
        async with self.admitted() as meter:
            prompts: list[list[int]] = []
            if asked.wanted.echo or asked.wanted.alternatives is not None:
                encode = self.engine.codec.encode_prompt
                prompts = await asyncio.to_thread(lambda: [encode(request.prompt) for request in asked.requests])
            done = [[_nothing_drawn(ids)] for ids in prompts]
            if asked.wanted.draws:
                async with self.submitted(asked, meter) as handles:
                    done = [await handle for handle in handles]
                self.check(done)
            scored = []
            if asked.wanted.alternatives is not None:
                scored = await self._scored(asked.wanted, prompts, done, meter)
            return Outcome(done, meter.forwards, prompts, scored)

    @asynccontextmanager
    async def admitted(self) -> AsyncIterator[Meter]:
        """A place at the engine, and a meter whose budget is what is left of the time limit."""
        async with self.gate.passed() as seconds:
            yield Meter(Budget(seconds=max(0.0, seconds)))

    @asynccontextmanager
    async def submitted(self, asked: Asked, meter: Meter, stream: bool = False) -> AsyncIterator[list[Handle]]:
        """The requests on their way. What is not done at the end is cancelled."""
        decoder = await self._decoder(asked.decoder)
        async with self._on_their_way(partial(decoder.submit, asked.requests, meter, stream)) as handles:
            yield handles

    def check(self, done: list[list[Completion]]) -> None:
        """Raise ServingError for texts that were cut off by a stop of the server, or before they began."""
        reasons = {completion.finish_reason for completions in done for completion in completions}
        if "cancelled" in reasons:
            raise closing()
        if "budget" in reasons and not any(one.tokens for completions in done for one in completions):
            raise late(self.limits)

    def cancel_all(self) -> None:
        """End whatever is being decoded, at the next step."""
        for handle in [*self._active]:
            handle.cancel()

    def close(self) -> None:
        """Give back what the methods set up here hold."""
        for name, decoder in self._decoders.items():
            if name != self.default:
                decoder.close()

    async def _decoder(self, name: str) -> LocalDecoder:
        """The decoder of a method. One that is being set up is kept, though the client that wanted it hangs up."""
        if name in self._decoders:
            return self._decoders[name]
        if name not in self._setting_up:
            self._setting_up[name] = setting = asyncio.ensure_future(asyncio.to_thread(self._set_up, name))
            setting.add_done_callback(partial(self._is_set_up, name))
        return await asyncio.shield(self._setting_up[name])

    def _is_set_up(self, name: str, setting: asyncio.Future[LocalDecoder]) -> None:
        del self._setting_up[name]
        if not setting.cancelled() and setting.exception() is None:
            self._decoders[name] = setting.result()

    def _set_up(self, name: str) -> LocalDecoder:
        fields = find_method(name).options.model_fields
        options = {key: value for key, value in self._options.items() if key in fields}
        return load_decoder(name, engine=self.engine, **options)

    @asynccontextmanager
    async def _on_their_way(self, submit: Callable[[], list[Handle]]) -> AsyncIterator[list[Handle]]:
        """Handles from `submit`, which tokenizes and therefore runs in a thread of its own."""
        submitting = asyncio.ensure_future(asyncio.to_thread(submit))
        try:
            handles = await asyncio.shield(submitting)
        except asyncio.CancelledError:  # the thread goes on, and what it brings is wanted no more
            submitting.add_done_callback(_cancel_what_came)
            raise
        except ModelError as error:  # raised by an engine that has failed for good
            self.failed = str(error)
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
        """The log-probabilities of each text's tokens, with `echo` of its prompt's too."""
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
        async with self._on_their_way(partial(self.engine.submit_all, heads, policies, meter)) as handles:
            self.check([await handle for handle in handles])
        return scored

    def _to_score(self, prompt: list[int], drawn: list[int], echo: bool) -> Scored:
        if not echo:
            return Scored(drawn, 0)
        if len(prompt) + len(drawn) > self.engine.runner.context:
            raise RequestError(
                f"the prompt has {len(prompt)} tokens and the model's context holds {self.engine.runner.context}: "
                "shorten the prompt"
            )
        return Scored([*prompt, *drawn], 1)


def _nothing_drawn(prompt: list[int]) -> Completion:
    return Completion("", (), 0.0, "length", Usage(prompt_tokens=len(prompt)))


def _cancel_what_came(submitting: asyncio.Future[list[Handle]]) -> None:
    if not submitting.cancelled() and submitting.exception() is None:
        for handle in submitting.result():
            handle.cancel()
