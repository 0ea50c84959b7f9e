"""Backend: carries one search's requests to the decoder their purpose is routed to, and counts what they take.

What is asked in one turn of the event loop goes out together. It adds no other batching: a local decoder's engine packs
whatever all running searches have in flight.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from tot.decoders.budget import Meter
from tot.decoders.decoder import AsyncDecoder, Decoder
from tot.decoders.errors import OptionError, RequestError, TotError
from tot.decoders.request import Completion, Purpose, Request, Usage
from tot.llm.replies import is_cut

_TEXT_ALONE: dict[Purpose, str] = {
    "generate": "generator='sample' in place of Enumerate(), or Enumerate(prior='uniform')",
    "evaluate": "evaluator='value' or 'vote' in place of likelihoods",
    "answer": "a task without `choices`, such as a subclass whose `choices` returns ()",
}
"""What asks for no choices to be scored, by purpose."""


@dataclass
class _Batch:
    """Requests of one purpose that go out together."""

    requests: list[Request] = field(default_factory=list)
    sent: asyncio.Task[list[list[Completion]]] = field(init=False)


class Backend:
    """Routes by purpose. Any object with `generate(requests)` will do; those with `complete` can stop in mid-text."""

    def __init__(self, decoders: Mapping[Purpose, Decoder], meter: Meter) -> None:
        self._decoders = decoders
        self.meter = meter
        self.calls = 0
        """Samples asked of a decoder: n a request."""
        self.spent: defaultdict[str, tuple[int, Usage]] = defaultdict(lambda: (0, Usage()))
        """Completions received, and what they took, by purpose."""
        self._batches: dict[Purpose, _Batch] = {}

    def can(self, purpose: Purpose) -> bool:
        """False where there is no model to ask."""
        return purpose in self._decoders

    def name(self, purpose: Purpose) -> str | None:
        """The decoder that a purpose is routed to."""
        decoder = self._decoders.get(purpose)
        if decoder is None:
            return None
        return str(getattr(decoder, "name", type(decoder).__name__))

    def loaded(self, purpose: Purpose) -> Any:
        """The LoadedModel of that decoder, where it runs here."""
        engine = getattr(self._decoders.get(purpose), "engine", None)
        return None if engine is None else engine.loaded

    def writes_steps(self, purpose: Purpose) -> bool:
        """True where that decoder writes parallel steps side by side."""
        return bool(getattr(self._decoders.get(purpose), "writes_steps", False))

    async def complete(self, requests: Sequence[Request]) -> list[list[Completion]]:
        """The n completions of each request, all of one purpose."""
        if not requests:
            return []
        self.calls += sum(request.sampling.n for request in requests)
        purpose = requests[0].purpose
        batch = self._batches.get(purpose)
        if batch is None or batch.sent.done():
            batch = self._batches[purpose] = _Batch()
            batch.sent = asyncio.create_task(self._send(purpose, batch))
        first = len(batch.requests)
        batch.requests += requests
        return (await batch.sent)[first : first + len(requests)]

    async def _send(self, purpose: Purpose, batch: _Batch) -> list[list[Completion]]:
        await asyncio.sleep(0)  # whatever else is asked in this turn goes along
        self._batches.pop(purpose)
        decoder = self._decoders.get(purpose)
        if decoder is None:
            raise RequestError(
                "this search asks a model, and there is none: give model=..., or a generator and an evaluator that "
                "need none, such as Enumerate(prior='uniform') and Heuristic() where the task defines those"
            )
        done = await self._decode(decoder, purpose, batch.requests)
        for request, completions in zip(batch.requests, done, strict=True):
            for completion in completions:
                calls, usage = self.spent[purpose]
                self.spent[purpose] = calls + 1, usage + completion.usage
                self.meter.usage += completion.usage
                self._check_choices(request, completion)
        return done

    async def _decode(self, decoder: Decoder, purpose: Purpose, requests: Sequence[Request]) -> list[list[Completion]]:
        if isinstance(decoder, AsyncDecoder):
            return await decoder.complete(requests, self.meter)
        flat = await asyncio.to_thread(self._generate, decoder, purpose, list(requests))
        wanted = sum(request.sampling.n for request in requests)
        if not isinstance(flat, list | tuple) or not all(isinstance(getattr(one, "text", None), str) for one in flat):
            raise OptionError(
                f"decoder {self.name(purpose)} returned {flat!r:.80}: its `generate` has to return a list of "
                "Completions, the text of each a str"
            )
        if len(flat) != wanted:
            raise OptionError(
                f"decoder {self.name(purpose)} gave {len(flat)} completions and {wanted} were asked "
                "for: its `generate` has to return request.sampling.n of them for each request, in one list"
            )
        self.meter.count(new_tokens=sum(one.usage.new_tokens for one in flat))
        left = iter(flat)
        return [list(islice(left, request.sampling.n)) for request in requests]

    def _generate(self, decoder: Decoder, purpose: Purpose, requests: list[Request]) -> Any:
        """What a decoder object gives. Raises RequestError, naming it, where its own code fails."""
        try:
            return decoder.generate(requests)
        except TotError:
            raise
        except (Exception, SystemExit) as error:
            raise RequestError(f"decoder {self.name(purpose)} raised {type(error).__name__}: {error}") from error

    def _check_choices(self, request: Request, completion: Completion) -> None:
        """Raises OptionError where choices were not scored, which not every decoder can."""
        wanted, got = len(request.choices), len(completion.choice_logprobs)
        if wanted != got and not is_cut(completion):
            raise OptionError(
                f"decoder {self.name(request.purpose)} scored {got} of {wanted} choices, and all of them are needed: "
                "have it give `choice_logprobs`, one for each of request.choices, or ask it for text alone "
                f"({_TEXT_ALONE[request.purpose]})"
            )
