"""Score given continuations of a request's prompt, without sampling, in steps of limited size.

Shared prefixes are computed once. All decoding methods score the choices of a request with `ScoreChoices`.
"""

from __future__ import annotations

from abc import abstractmethod
from collections import deque
from collections.abc import Sequence

from tot.decoders.engine.radix_cache import Branch
from tot.decoders.engine.runner import Chunk
from tot.decoders.engine.sampling import Raw, Sampled
from tot.decoders.engine.sequence import Job, Policy
from tot.decoders.request import ChoiceLogprob

_ROWS = 128
"""Rows per step, so that other requests run in between."""


class Scoring(Policy):
    """Scores continuations of the prompt. With `raw`, rows of logits are read instead of log-probabilities."""

    def __init__(self, job: Job, continuations: Sequence[Sequence[int]], raw: bool = False) -> None:
        self._job = job
        self._continuations = continuations
        self._raw = raw
        self._forks: list[Branch] = []
        self._steps: deque[list[tuple[int, Chunk]]] = deque()
        """For each remaining step: pairs of (index of a continuation, a chunk of it)."""

    @abstractmethod
    def take(self, number: int, row: Sequence[Sampled]) -> None:
        """Take the reads of the next tokens of a continuation."""

    def end(self) -> None:
        """Complete the output, after all reads."""

    def propose(self) -> list[Chunk]:
        if not self._steps:
            self._begin()
        self._job.outputs[0].forwards += 1
        return [chunk for _, chunk in self._steps[0]]

    def _begin(self) -> None:
        cache, branch, pending = self._job.cache, self._job.branch, self._job.prompt[-1:]
        for tokens in self._continuations:
            self._forks.append(cache.fork(branch))
            cache.extend(self._forks[-1], [*pending, *tokens[:-1]])  # logits at a position predict the next token
        start, end = len(branch), max(map(len, self._forks))
        while start < end:
            stop = self._stop(start, end)
            step = []
            for number, (fork, tokens) in enumerate(zip(self._forks, self._continuations, strict=True)):
                first, last = len(fork) - len(tokens), min(stop, len(fork))
                if start < last:
                    reads = list(tokens[max(start, first) - first : last - first]) if last > first else []
                    step.append((number, Chunk(fork, start, last, [Raw()] * len(reads) if self._raw else reads)))
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

    def commit(self, reads: list[list[Sampled]]) -> None:
        for (number, _), row in zip(self._steps.popleft(), reads, strict=True):
            self.take(number, row)
        if not self._steps:
            self.end()
            self._job.outputs[0].end("stop")
            self.release()

    def need(self, tokens: int) -> int:
        return 1 if self._forks else 1 + sum(map(len, self._continuations))

    def release(self) -> None:
        for fork in self._forks:
            self._job.cache.release(fork)


class ScoreChoices(Scoring):
    """Computes the log-probability of each choice."""

    def __init__(self, job: Job, choices: Sequence[Sequence[int]] | None = None) -> None:
        """`choices`: their tokens, by default of the request's choices."""
        super().__init__(job, job.codec.encode_choices(job.request) if choices is None else choices)
        self._logprobs: list[list[float]] = [[] for _ in self._continuations]

    def take(self, number: int, row: Sequence[Sampled]) -> None:
        self._logprobs[number] += [one.logprob for one in row]

    def end(self) -> None:
        self._job.outputs[0].choice_logprobs = tuple(ChoiceLogprob(sum(one), len(one)) for one in self._logprobs)
