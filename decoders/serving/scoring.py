"""Score the tokens of a given text: a policy that feeds the text in chunks and reads logprobs, without sampling.

Its keys and values are cached and shared like all others. This module knows nothing of HTTP.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from scipy.special import log_softmax

from tot.decoders.engine.runner import Chunk
from tot.decoders.engine.sampling import Sampled
from tot.decoders.engine.scoring import Scorer
from tot.decoders.engine.sequence import Job, Policy


@dataclass(slots=True)
class Scored:
    """The tokens of one text and their logprobs (nats), before temperature and filters, filled in chunks."""

    tokens: list[int]
    unscored: int
    """Number of tokens at the start that are not scored."""
    logprobs: list[float] = field(default_factory=list)
    top: list[list[tuple[int, float]]] = field(default_factory=list)
    """At each scored position the most likely tokens, best first, and its own token, with their logprobs."""


class Scoring(Policy):
    """Scores a text's tokens after the unscored ones, as the continuation of the request's prompt."""

    def __init__(self, job: Job, text: Scored, top: int) -> None:
        self._job = job
        self._text = text
        self._tokens = text.tokens[text.unscored :]
        self._top = top
        self._scorer: Scorer | None = None

    def propose(self) -> list[Chunk]:
        job = self._job
        if self._scorer is None:
            self._scorer = Scorer(job.cache, job.branch, job.prompt[-1:], [self._tokens], raw=self._top > 0)
        job.outputs[0].forwards += 1
        return self._scorer.chunks

    def commit(self, reads: list[list[Sampled]]) -> None:
        assert self._scorer is not None
        complete = self._scorer.take(reads)
        (rows,) = self._scorer.scores
        self._scorer.scores = [[]]  # rows of logits are large
        for row in rows:
            self._add(row)
        if complete:
            self._job.outputs[0].end("stop")
            self.release()

    def _add(self, row: Sampled) -> None:
        """Add the score of the next token."""
        text = self._text
        if row.logits is None:
            text.logprobs.append(row.logprob)
            return
        logprobs, token = log_softmax(row.logits), self._tokens[len(text.logprobs)]
        best = np.argsort(-logprobs, stable=True)[: self._top].tolist()
        text.logprobs.append(float(logprobs[token]))
        text.top.append([(i, float(logprobs[i])) for i in (best if token in best else [*best, token])])

    def growth(self) -> int:
        return 1 + len(self._tokens) if self._scorer is None else 0

    def release(self) -> None:
        if self._scorer is not None:
            self._scorer.release()
