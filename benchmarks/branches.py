"""Branches of one prompt: the same work for any engine, and our engine's side of it."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.engines import forget, timed_parts
from benchmarks.harness import Measured, SideError, timed
from tot.decoders.decoder import LocalDecoder
from tot.decoders.request import Request, Sampling
from tot.registry import load_task


@dataclass(frozen=True, slots=True)
class Branches:
    """Samples of one prompt, at temperature 1, that do not end before their length."""

    prompt: Sequence[int]
    """Token ids."""
    count: int
    new: int
    """New tokens of each sample."""

    def measured(self, seconds: float, prefill: float, samples: Sequence[Sequence[int]]) -> Measured:
        """Return an engine's measurement. `prefill`: seconds until every sample had its first token.

        Raises SideError for other numbers of tokens.
        """
        tokens = sum(map(len, samples))
        if tokens != self.count * self.new:
            raise SideError(f"it sampled {tokens} tokens instead of {self.count * self.new}")
        return {"seconds": seconds, "prefill": prefill, "tokens": tokens}


def mixed_ids(tokenizer: Any, length: int = 1000) -> list[int]:
    """Return a prompt of `length` tokens: random words of the GSM8K task's demonstrations.

    Its continuation is unpredictable, so samples differ and an engine cannot share their computation.
    """
    words = [word for entry in load_task("gsm8k").prompts.data("demonstrations") for word in entry["question"].split()]
    text = " ".join(random.Random(0).choices(words, k=length))
    ids: list[int] = tokenizer.encode(text)[:length]
    return ids


def rotated(ids: Sequence[int], by: int) -> list[int]:
    """Rotate the tokens, so that they share no prefix with other rotations."""
    by %= len(ids)
    return [*ids[by:], *ids[:by]]


def decoded(decoder: LocalDecoder, work: Branches) -> Measured:
    """Decode branches in packed forward passes, from an empty cache."""
    forget(decoder)
    sampling = Sampling(max_tokens=work.new, temperature=1.0, ignore_eos=True, n=work.count)
    request = Request(prompt=tuple(work.prompt), sampling=sampling)
    with timed_parts(decoder.engine) as timeline:
        seconds, completions = timed(lambda: decoder.generate([request]))
    sampled = [span.ended for span in timeline.spans if span.kind == "sampling"]
    prefill = sampled[-work.new] - timeline.spans[0].began
    return work.measured(seconds, prefill, [one.tokens for one in completions])
