"""The reference policy: one token per step and sample, all samples and requests packed into one forward.

Every lossless method must return the same text. This policy also does the two things that all methods share: it scores
choices, and it decodes the answer after a rationale.
"""

from __future__ import annotations

from collections.abc import Iterator

from tot.decoders.engine.runner import Chunk
from tot.decoders.engine.sampling import Sampled
from tot.decoders.engine.sequence import ChoiceScorer, DecodingSequence, Job, Policy

_RETOKENISED_SLOTS = 16
"""Slots for encoding again the first part of a token that a stop string cut in two."""


class Autoregressive(Policy):
    """Decode the text, or score the request's choices. With an answer trigger, decode the rationale first."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._sequences: list[DecodingSequence] | None = None
        self._choices = job.codec.encode_choices(job.request)
        self._trigger = job.codec.encode(job.request.answer_trigger or "")
        self._in_answer: set[int] = set()

    def growth(self) -> int:
        answer = len(self._trigger) + _RETOKENISED_SLOTS if self._trigger else 0
        if self._choices:
            answer += sum(map(len, self._choices))
        elif self._trigger:
            answer += self._job.request.answer_tokens
        running = self._running()
        # A scorer has all of its slots.
        scored = {sequence.output.index for sequence in running if sequence.scorer is not None}
        if self._choices and not self._trigger:
            return 0 if scored else 1 + answer
        texts = [output for output in self._job.running if output.index not in scored]
        waiting = sum(output.index not in self._in_answer for output in texts)
        # Triggers that are pending.
        answering = (sequence for sequence in running if sequence.output.index in self._in_answer - scored)
        pending = sum(len(sequence.pending) for sequence in answering)
        return 1 + sum(output.room for output in texts) + answer * waiting + pending

    def decoding(self) -> list[DecodingSequence]:
        """Return the samples that are about to draw tokens; others score choices."""
        if self._sequences is None:
            cache, last = self._job.cache, self._job.text[-1:]
            self._sequences = [
                DecodingSequence(self._job, output, cache.fork(self._job.branch), last) for output in self._job.outputs
            ]
            if self._choices and not self._trigger:
                for sequence in self._sequences:
                    sequence.scorer = ChoiceScorer(cache, sequence.branch, sequence.pending, self._choices)
        return [sequence for sequence in self._running() if sequence.scorer is None]

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
                scores = sequence.scorer.take([next(rows) for _ in sequence.scorer.chunks])
                if scores is None:
                    continue
                output.choice_logprobs = scores
                output.end("stop")
                sequence.scorer.release()
                self._job.cache.release(sequence.branch)
                continue
            self.take(sequence, rows)
            if output.finish_reason is None:
                continue
            if self._trigger and output.index not in self._in_answer:
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
        self._in_answer.add(output.index)
        if self._choices:
            sequence.scorer = ChoiceScorer(job.cache, sequence.branch, sequence.pending, self._choices)

    def turn(self) -> list[DecodingSequence]:
        """Return the samples of this step: all running ones."""
        return self._running()

    def _running(self) -> list[DecodingSequence]:
        return [sequence for sequence in self._sequences or () if sequence.output.finish_reason is None]

    @property
    def pausable(self) -> bool:
        return len(self._job.outputs) == 1 and not self._trigger and not self._choices

    def pause(self) -> None:
        self.release()
        self._sequences = None

    def release(self) -> None:
        for sequence in self._sequences or ():
            if sequence.scorer is not None:
                sequence.scorer.release()
            self._job.cache.release(sequence.branch)
