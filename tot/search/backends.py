"""Backend: carries a search's requests to the decoder their purpose is routed to, and brings back completions.

It adds no batching of its own: a local decoder's engine packs whatever all running searches have in flight.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from itertools import islice

from tot.decoders.budget import Meter
from tot.decoders.decoder import AsyncDecoder, Decoder
from tot.decoders.errors import OptionError, RequestError
from tot.decoders.request import Completion, Purpose, Request

DecoderSpec = str | Decoder | Mapping[Purpose, str | Decoder]
"""A decoder, its name, or one or the other by purpose."""
_TEXT_ALONE: dict[Purpose, str] = {
    "generate": "generator='sample' in place of Enumerate(), or Enumerate(prior='uniform')",
    "evaluate": "evaluator='value' or 'vote' in place of likelihoods",
    "answer": "a task without `choices`, such as MultipleChoice(by='text')",
}
"""What asks for no choices to be scored, by purpose."""


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
            flat = await asyncio.to_thread(decoder.generate, list(requests))
            wanted = sum(request.sampling.n for request in requests)
            if len(flat) != wanted:
                raise OptionError(
                    f"decoder {self.name(requests[0].purpose)} gave {len(flat)} completions and {wanted} were asked "
                    "for: its `generate` has to return request.sampling.n of them for each request, in one list"
                )
            left = iter(flat)
            done = [list(islice(left, request.sampling.n)) for request in requests]
            meter.count(new_tokens=sum(one.usage.new_tokens for one in flat))
        for request, completions in zip(requests, done, strict=True):
            for completion in completions:
                meter.usage += completion.usage
                self._check_choices(request, completion)
        return done

    def _check_choices(self, request: Request, completion: Completion) -> None:
        """Raises OptionError where choices were not scored, which not every decoder can."""
        wanted, got = len(request.choices), len(completion.choice_logprobs)
        if wanted != got and not is_cut(completion):
            raise OptionError(
                f"decoder {self.name(request.purpose)} scored {got} of {wanted} choices, and all of them are needed: "
                "have it give `choice_logprobs`, one for each of request.choices, or ask it for text alone "
                f"({_TEXT_ALONE[request.purpose]})"
            )


def is_cut(completion: Completion) -> bool:
    """True where a budget or a cancellation ended the text before its time."""
    return completion.finish_reason in ("budget", "cancelled")
