"""Score the choices of a request as continuations of its prompt. All decoding methods score them in this way."""

from __future__ import annotations

from collections.abc import Sequence

from tot.decoders.engine.runner import Chunk
from tot.decoders.engine.sampling import Sampled
from tot.decoders.engine.scoring import Scorer
from tot.decoders.engine.sequence import Job, Policy
from tot.decoders.request import ChoiceLogprob


class ScoreChoices(Policy):
    """Computes the log-probability of each choice."""

    def __init__(self, job: Job, choices: Sequence[Sequence[int]] | None = None) -> None:
        """`choices`: their tokens, by default of the request's choices."""
        self._job = job
        self._choices = job.codec.encode_choices(job.request) if choices is None else choices
        self._scorer: Scorer | None = None

    def propose(self) -> list[Chunk]:
        job = self._job
        if self._scorer is None:
            self._scorer = Scorer(job.cache, job.branch, job.prompt[-1:], self._choices)
        job.outputs[0].forwards += 1
        return self._scorer.chunks

    def commit(self, reads: list[list[Sampled]]) -> None:
        assert self._scorer is not None
        if self._scorer.take(reads):
            (output,) = self._job.outputs
            output.choice_logprobs = tuple(
                ChoiceLogprob(sum(token.logprob for token in row), len(row)) for row in self._scorer.scores
            )
            output.end("stop")
            self.release()

    def growth(self) -> int:
        return 1 + sum(map(len, self._choices)) if self._scorer is None else 1

    def release(self) -> None:
        if self._scorer is not None:
            self._scorer.release()
