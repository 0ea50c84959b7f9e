"""Scorer: the log-probabilities of given continuations of a text, without sampling."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from tot.decoders.engine.radix_cache import Branch, RadixCache
from tot.decoders.engine.runner import Chunk
from tot.decoders.engine.sampling import Raw, Sampled

_ROWS = 128
"""Rows per step, so that other requests run in between."""


class Scorer:
    """Scores continuations of one branch, in steps of limited size. Shared prefixes are computed once."""

    def __init__(
        self,
        cache: RadixCache,
        branch: Branch,
        pending: Sequence[int],
        continuations: Sequence[Sequence[int]],
        raw: bool = False,
    ) -> None:
        """`pending` are tokens of the text that the branch lacks. With `raw`, rows of logits are read instead."""
        self.scores: list[list[Sampled]] = [[] for _ in continuations]
        """For each continuation, the read at each of its tokens so far."""
        self._cache = cache
        self._forks = [cache.fork(branch) for _ in continuations]
        self._steps: deque[list[tuple[int, Chunk]]] = deque()
        """For each remaining step: pairs of (index of a continuation, a chunk of it)."""
        for fork, tokens in zip(self._forks, continuations, strict=True):
            cache.extend(fork, [*pending, *tokens[:-1]])  # logits at a position predict the next token
        start, end = len(branch), max(map(len, self._forks))
        while start < end:
            stop = self._stop(start, end)
            step = []
            for number, (fork, tokens) in enumerate(zip(self._forks, continuations, strict=True)):
                first, last = len(fork) - len(tokens), min(stop, len(fork))
                if start < last:
                    reads = list(tokens[max(start, first) - first : last - first]) if last > first else []
                    step.append((number, Chunk(fork, start, last, [Raw()] * len(reads) if raw else reads)))
            self._steps.append(step)
            start = stop

    def _stop(self, start: int, end: int) -> int:
        """Return the end of a step that begins at `start`. Shared prefixes count as one row."""
        rows = 0
        for position in range(start, end):
            rows += len({fork.slots[position] for fork in self._forks if len(fork) > position})
            if rows > _ROWS and position > start:
                return position
        return end

    @property
    def chunks(self) -> list[Chunk]:
        """The chunks to run next."""
        return [chunk for _, chunk in self._steps[0]]

    def take(self, reads: Sequence[Sequence[Sampled]]) -> bool:
        """Take the reads of the chunks. Returns whether all chunks have run."""
        for (number, _), row in zip(self._steps.popleft(), reads, strict=True):
            self.scores[number] += row
        return not self._steps

    def release(self) -> None:
        for fork in self._forks:
            self._cache.release(fork)
