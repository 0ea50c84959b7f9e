"""DecodingSequence: one sample of a request while it is decoded; and choices scored as what may follow it."""

from __future__ import annotations

import itertools
from collections import deque
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
_ROWS = 512
"""Rows of choices that a step computes: other requests take their turns between."""


class ChoiceScorer:
    """Scores continuations of one branch, in steps of so many rows: equal beginnings are computed once."""

    def __init__(
        self, cache: RadixCache, branch: Branch, pending: Sequence[int], choices: Sequence[Sequence[int]]
    ) -> None:
        self._cache = cache
        self._forks = [cache.fork(branch) for _ in choices]
        self._logprobs: list[list[float]] = [[] for _ in choices]
        self._steps: deque[list[tuple[int, Chunk]]] = deque()
        """(which choice, a piece of it) of each step still to be run."""
        for fork, choice in zip(self._forks, choices, strict=True):
            cache.extend(fork, [*pending, *choice[:-1]])  # logits at a position are about the token after it
        start, end = len(branch), max(map(len, self._forks))
        while start < end:
            stop = self._stop(start, end)
            step = []
            for number, (fork, choice) in enumerate(zip(self._forks, choices, strict=True)):
                first, last = len(fork) - len(choice), min(stop, len(fork))
                if start < last:
                    reads = list(choice[max(start, first) - first : last - first]) if last > first else []
                    step.append((number, Chunk(fork, start, last, reads)))
            self._steps.append(step)
            start = stop

    def _stop(self, start: int, end: int) -> int:
        """Up to where all choices are run in a step that begins at a position: equal beginnings are one row."""
        rows = 0
        for at in range(start, end):
            rows += len({fork.slots[at] for fork in self._forks if len(fork) > at})
            if rows > _ROWS and at > start:
                return at
        return end

    @property
    def chunks(self) -> list[Chunk]:
        """What is to be run next."""
        return [chunk for _, chunk in self._steps[0]]

    def take(self, reads: Sequence[Sequence[Sampled]]) -> tuple[ChoiceLogprob, ...] | None:
        """Take what was read for the chunks. Returns the scores once all are run."""
        for (number, _), row in zip(self._steps.popleft(), reads, strict=True):
            self._logprobs[number] += [token.logprob for token in row]
        if self._steps:
            return None
        return tuple(ChoiceLogprob(sum(row), len(row)) for row in self._logprobs)

    def release(self) -> None:
        for fork in self._forks:
            self._cache.release(fork)


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
