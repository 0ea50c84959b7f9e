"""Backend: carries a search's requests to the decoder their purpose is routed to, and brings back completions.

It adds no batching of its own: a local decoder's engine packs whatever all running searches have in flight.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

from tot.decoders.budget import Meter
from tot.decoders.decoder import AsyncDecoder, Decoder
from tot.decoders.errors import RequestError
from tot.decoders.request import Completion, Purpose, Request


class Backend:
    """Routes by purpose. Any object with `generate(requests)` will do; those with `complete` can stop in mid-text."""

    def __init__(self, decoders: Mapping[Purpose, Decoder]) -> None:
        self._decoders = decoders

    def can(self, purpose: Purpose) -> bool:
        """False where there is no model to ask."""
        return purpose in self._decoders

    def name(self, purpose: Purpose) -> str | None:
        """The decoder that a purpose is routed to."""
        decoder = self._decoders.get(purpose)
        return None if decoder is None else str(getattr(decoder, "name", type(decoder).__name__))

    async def complete(self, requests: Sequence[Request], meter: Meter) -> list[list[Completion]]:
        """The n completions of each request, all of one purpose, counted on `meter`."""
        decoder = self._decoders.get(requests[0].purpose)
        if decoder is None:
            raise RequestError(
                "this search asks a model, and there is none: give model=..., or a generator and an evaluator that "
                "need none, such as Enumerate(prior='uniform') and Heuristic()"
            )
        if isinstance(decoder, AsyncDecoder):
            done = await decoder.complete(requests, meter)
        else:
            flat = iter(await asyncio.to_thread(decoder.generate, list(requests)))
            done = [[next(flat) for _ in range(request.sampling.n)] for request in requests]
            meter.count(new_tokens=sum(one.usage.new_tokens for completions in done for one in completions))
        for completions in done:
            for completion in completions:
                meter.usage += completion.usage
        return done
