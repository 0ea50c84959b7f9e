"""The reference policy: one token per step and sample, all samples and requests packed into one forward.

Every lossless method must return the same text. This policy also does the two things that all methods share: it scores
choices, and it decodes the answer after a rationale.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

from tot.decoders.engine.output import Output
from tot.decoders.engine.runner import Chunk
from tot.decoders.engine.sampling import Sampled
from tot.decoders.engine.scoring import Scorer
from tot.decoders.engine.sequence import DecodingSequence, Job, Policy
from tot.decoders.request import ChoiceLogprob

_RETOKENISED_SLOTS = 16
"""Slots for encoding again the first part of a token that a stop string cut in two."""


class Autoregressive(Policy):
    """Decode the text, or score the request's choices. With an answer trigger, decode the rationale first."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._sequences: list[DecodingSequence] | None = None
        self._choices = job.codec.encode_choices(job.request)
        self._trigger = job.codec.encode(job.request.answer_trigger or "")
        self._heads: dict[int, list[int]] = {}
        """By sample, once it answers: the tokens before the answer."""

    def growth(self) -> int:
        return self.need(sys.maxsize)

    def need(self, tokens: int) -> int:
        request, slots = self._job.request, 1
        choices = sum(map(len, self._choices))
        sequences = {sequence.output.index: sequence for sequence in self._running()}
        for output in self._job.running:
            sequence, answering = sequences.get(output.index), output.index in self._heads
            if sequence is not None and sequence.scorer is not None:  # it has all of its slots
                continue
            room = 0 if self._choices and (answering or not self._trigger) else output.room
            if self._trigger and not answering:
                slots += len(self._trigger) + _RETOKENISED_SLOTS
                room += 0 if self._choices else request.answer_tokens
            elif answering and sequence is not None:
                slots += len(sequence.pending)  # the trigger
            slots += choices + min(room, tokens)
        return slots

    def decoding(self) -> list[DecodingSequence]:
        """Return the samples that are about to draw tokens; others score choices."""
        if self._sequences is None:
            self._sequences = [self._sequence(output) for output in self._job.running]
        return [sequence for sequence in self._running() if sequence.scorer is None]

    def _sequence(self, output: Output) -> DecodingSequence:
        """Begin or resume a sample."""
        job = self._job
        branch = job.resumed.pop(output.index) if output.index in job.resumed else job.cache.fork(job.branch)
        sequence = DecodingSequence(job, output, branch, self._text(output)[len(branch) :])
        if self._choices and (output.index in self._heads or not self._trigger):
            sequence.scorer = Scorer(job.cache, branch, sequence.pending, self._choices)
        return sequence

    def _text(self, output: Output) -> list[int]:
        """Return the tokens of a sample, prompt included."""
        return [*self._heads.get(output.index, self._job.prompt), *output.tokens[output.first :]]

    def propose(self) -> list[Chunk]:
        self.decoding()
        chunks = []
        for sequence in self.turn():
            sequence.output.forwards += 1
            chunks += self.run(sequence) if sequence.scorer is None else sequence.scorer.chunks
        return chunks

    def commit(self, reads: list[list[Sampled]]) -> None:
        rows = iter(reads)
        for sequence in self.turn():
            output = sequence.output
            if sequence.scorer is not None:
                if not sequence.scorer.take([next(rows) for _ in sequence.scorer.chunks]):
                    continue
                output.choice_logprobs = tuple(
                    ChoiceLogprob(sum(token.logprob for token in row), len(row)) for row in sequence.scorer.scores
                )
                output.end("stop")
                sequence.scorer.release()
                self._job.cache.release(sequence.branch)
                continue
            self.take(sequence, rows)
            if output.finish_reason is None:
                continue
            if self._trigger and output.index not in self._heads:
                self._begin_answer(sequence)
            else:
                self._job.cache.release(sequence.branch)

    def run(self, sequence: DecodingSequence) -> list[Chunk]:
        """Return the chunks that draw a sample's next token."""
        start = len(sequence.branch)
        self._job.cache.extend(sequence.branch, sequence.pending)
        return [Chunk(sequence.branch, start, len(sequence.branch), [sequence.output.draw()])]

    def take(self, sequence: DecodingSequence, rows: Iterator[list[Sampled]]) -> None:
        """Add the token drawn, and leave it pending. The branch holds the prompt and all tokens but the last."""
        (sampled,) = next(rows)
        sequence.pending = [sampled.token]
        sequence.output.add(sampled)

    def _begin_answer(self, sequence: DecodingSequence) -> None:
        """Begin the answer or the scoring of choices after a rationale.

        This drops the tokens beyond the rationale's end, and appends the glimpse, if any, and the trigger.
        """
        job, output = self._job, sequence.output
        trigger = job.request.answer_trigger
        assert trigger is not None
        drawn = list(output.tokens)
        retained, rest = output.begin_answer(trigger, job.request.answer_tokens)
        ids = [*job.prompt, *drawn[:retained], *output.glimpse, *job.codec.encode(rest)]
        fed = min(len(sequence.branch), len(job.prompt) + retained)
        job.cache.rollback(sequence.branch, fed)
        sequence.pending = ids[fed:]
        self._heads[output.index] = ids
        if self._choices:
            sequence.scorer = Scorer(job.cache, sequence.branch, sequence.pending, self._choices)

    def turn(self) -> list[DecodingSequence]:
        """Return the samples of this step: all running ones."""
        return self._running()

    def _running(self) -> list[DecodingSequence]:
        return [sequence for sequence in self._sequences or () if sequence.output.finish_reason is None]

    @property
    def pausable(self) -> bool:
        return True

    def pause(self) -> None:
        self.release()
        self._sequences = None

    def texts(self) -> dict[int, list[int]]:
        return {output.index: self._text(output) for output in self._job.running} if self._job.pauses else {}

    def release(self) -> None:
        for sequence in self._sequences or ():
            if sequence.scorer is not None:
                sequence.scorer.release()
            self._job.cache.release(sequence.branch)
