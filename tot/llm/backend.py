"""Backend: route the requests of one search to decoders by purpose, and count their usage.

Requests made in one iteration of the event loop are sent together. There is no other batching here: a local decoder's
engine batches the requests of all running searches.
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
"""Alternatives that need no scored choices, by purpose."""


@dataclass
class _Batch:
    """Requests of one purpose that are sent together."""

    requests: list[Request] = field(default_factory=list)
    sent: asyncio.Task[list[list[Completion]]] = field(init=False)


class Backend:
    """Router of requests to decoders. A decoder needs `generate(requests)`; with `complete` it can stop in mid-text."""

    def __init__(self, decoders: Mapping[Purpose, Decoder], meter: Meter) -> None:
        self._decoders = decoders
        self.meter = meter
        self.calls = 0
        """Number of samples requested from decoders: n per request."""
        self.spent: defaultdict[str, tuple[int, Usage]] = defaultdict(lambda: (0, Usage()))
        """Number of completions received and their usage, by purpose."""
        self._batches: dict[Purpose, _Batch] = {}

    def can(self, purpose: Purpose) -> bool:
        """Return whether a decoder serves this purpose."""
        return purpose in self._decoders

    def name(self, purpose: Purpose) -> str | None:
        """Return the name of the decoder of a purpose, or None."""
        decoder = self._decoders.get(purpose)
        if decoder is None:
            return None
        return str(getattr(decoder, "name", type(decoder).__name__))

    def loaded(self, purpose: Purpose) -> Any:
        """Return the LoadedModel of the purpose's decoder, or None if it does not run locally."""
        engine = getattr(self._decoders.get(purpose), "engine", None)
        return None if engine is None else engine.loaded

    def writes_steps(self, purpose: Purpose) -> bool:
        """Return whether the purpose's decoder decodes parallel steps."""
        return bool(getattr(self._decoders.get(purpose), "writes_steps", False))

    async def complete(self, requests: Sequence[Request]) -> list[list[Completion]]:
        """Return the n completions of each request. All requests have the same purpose."""
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
        await asyncio.sleep(0)  # wait for other requests in this iteration of the event loop
        self._batches.pop(purpose)
        decoder = self._decoders.get(purpose)
        if decoder is None:
            raise RequestError(
                "the search needs a model, but none was given: give model=..., or a generator and an evaluator that "
                "need none, such as Enumerate(prior='uniform') and Heuristic() if the task supports them"
            )
        results = await self._decode(decoder, purpose, batch.requests)
        for request, completions in zip(batch.requests, results, strict=True):
            for completion in completions:
                calls, usage = self.spent[purpose]
                self.spent[purpose] = calls + 1, usage + completion.usage
                self.meter.usage += completion.usage
                self._check_choices(request, completion)
        return results

    async def _decode(self, decoder: Decoder, purpose: Purpose, requests: Sequence[Request]) -> list[list[Completion]]:
        if isinstance(decoder, AsyncDecoder):
            return await decoder.complete(requests, self.meter)
        flat = await asyncio.to_thread(self._generate, decoder, purpose, list(requests))
        expected = sum(request.sampling.n for request in requests)
        if not isinstance(flat, list | tuple) or not all(isinstance(getattr(one, "text", None), str) for one in flat):
            raise OptionError(
                f"decoder {self.name(purpose)} returned {flat!r:.80}: its `generate` must return a list of "
                "Completions, the text of each a str"
            )
        if len(flat) != expected:
            raise OptionError(
                f"decoder {self.name(purpose)} returned {len(flat)} completions instead of {expected}: its `generate` "
                "must return request.sampling.n of them for each request, in one list"
            )
        self.meter.count(new_tokens=sum(one.usage.new_tokens for one in flat))
        remaining = iter(flat)
        return [list(islice(remaining, request.sampling.n)) for request in requests]

    def _generate(self, decoder: Decoder, purpose: Purpose, requests: list[Request]) -> Any:
        """Return a decoder object's completions. Raises RequestError, naming the decoder, if its code fails."""
        try:
            return decoder.generate(requests)
        except TotError:
            raise
        except (Exception, SystemExit) as error:
            raise RequestError(f"decoder {self.name(purpose)} raised {type(error).__name__}: {error}") from error

    def _check_choices(self, request: Request, completion: Completion) -> None:
        """Raise OptionError if the decoder did not score all choices. Not every decoder can."""
        expected, scored = len(request.choices), len(completion.choice_logprobs)
        if expected != scored and not is_cut(completion):
            raise OptionError(
                f"decoder {self.name(request.purpose)} scored {scored} of {expected} choices, but all are needed: "
                "return `choice_logprobs`, one for each of request.choices, or use it for text only "
                f"({_TEXT_ALONE[request.purpose]})"
            )
