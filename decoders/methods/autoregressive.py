"""ar: one token per step and sample, all samples and requests packed into one forward. The reference for all methods.

Every lossless method must return the same text.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

from tot.decoders.engine.runner import Chunk
from tot.decoders.engine.sampling import Sampled
from tot.decoders.engine.sequence import DecodingSequence, Job, Policy
from tot.decoders.methods.method import Method, MethodOptions, OpenedMethod


class Autoregressive(Policy):
    """Decode the samples of a request."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._sequences: list[DecodingSequence] | None = None

    def need(self, tokens: int) -> int:
        most = tokens if self.pausable else sys.maxsize
        pending = sum(len(sequence.pending) - 1 for sequence in self._running())
        return 1 + pending + sum(min(output.room, most) for output in self._job.running)

    def decoding(self) -> list[DecodingSequence]:
        job = self._job
        if self._sequences is None:
            self._sequences = []
            for output in job.running:
                branch = job.resumed.pop(output.index) if output.index in job.resumed else job.cache.fork(job.branch)
                self._sequences.append(DecodingSequence(job, output, branch, job.text(output)[len(branch) :]))
        return self._running()

    def propose(self) -> list[Chunk]:
        self.decoding()
        chunks = []
        for sequence in self.turn():
            sequence.output.forwards += 1
            chunks += self.run(sequence)
        return chunks

    def commit(self, reads: list[list[Sampled]]) -> None:
        rows = iter(reads)
        for sequence in self.turn():
            self.take(sequence, rows)
            if sequence.output.finish_reason is not None:
                self._job.cache.release(sequence.branch)

    def run(self, sequence: DecodingSequence) -> list[Chunk]:
        """Return the chunks that draw a sample's next token."""
        start = len(sequence.branch)
        self._job.cache.extend(sequence.branch, sequence.pending)
        return [Chunk(sequence.branch, start, len(sequence.branch), [sequence.output.draw()])]

    def take(self, sequence: DecodingSequence, rows: Iterator[list[Sampled]]) -> None:
        """Add the token drawn and the tokens that it forces, and leave them pending: the branch has all others."""
        (sampled,) = next(rows)
        sequence.output.add(sampled)
        sequence.pending = [sampled.token, *sequence.output.force()]

    def turn(self) -> list[DecodingSequence]:
        """Return the samples of this step: all running ones."""
        return self._running()

    def _running(self) -> list[DecodingSequence]:
        return [sequence for sequence in self._sequences or () if sequence.output.finish_reason is None]

    @property
    def pausable(self) -> bool:
        return True

    def release(self) -> None:
        for sequence in self._sequences or ():
            self._job.cache.release(sequence.branch)
        self._sequences = None


class AROptions(MethodOptions):
    """Autoregressive decoding: one token a step for every branch, all branches in one forward pass. No options."""


METHOD = Method(lambda engine, options, stack: OpenedMethod(Autoregressive), AROptions)
