"""DecodingSequence: one sample of a request while it is decoded; and choices scored as what may follow it."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING

from tot.decoders.engine.output import Output
from tot.decoders.engine.radix_cache import Branch, RadixCache
from tot.decoders.engine.runner import Chunk
from tot.decoders.engine.sampling import Sampled
from tot.decoders.request import ChoiceLogprob

if TYPE_CHECKING:
    from tot.decoders.engine.job import Job

_keys = itertools.count()


class ChoiceScorer:
    """Scores continuations of one branch, all of them in one forward: equal beginnings are computed once."""

    def __init__(
        self, cache: RadixCache, branch: Branch, pending: Sequence[int], choices: Sequence[Sequence[int]]
    ) -> None:
        self._cache = cache
        self.chunks: list[Chunk] = []
        for choice in choices:
            fork = cache.fork(branch)
            cache.extend(fork, [*pending, *choice[:-1]])  # logits at a position are about the token after it
            self.chunks.append(Chunk(fork, len(branch), len(fork), list(choice)))

    def scores(self, reads: Sequence[Sequence[Sampled]]) -> tuple[ChoiceLogprob, ...]:
        return tuple(ChoiceLogprob(sum(token.logprob for token in row), len(row)) for row in reads)

    def release(self) -> None:
        for chunk in self.chunks:
            self._cache.release(chunk.branch)


class DecodingSequence:
    """One sample: its branch, and the tokens that were drawn or given but not yet fed."""

    def __init__(self, job: Job, output: Output, branch: Branch, pending: list[int]) -> None:
        self.key = next(_keys)
        """What its text is known by to drafters."""
        self.job = job
        self.output = output
        self.branch = branch
        self.pending = pending
        self.scorer: ChoiceScorer | None = None
