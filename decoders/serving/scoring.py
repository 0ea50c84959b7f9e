"""Score the tokens of a given text: a policy that feeds the text in chunks and reads logprobs, without sampling.

Its keys and values are cached and shared like all others. This module knows nothing of HTTP.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from scipy.special import log_softmax

from tot.decoders.engine.radix_cache import Branch
from tot.decoders.engine.runner import Chunk
from tot.decoders.engine.sampling import Raw, Sampled
from tot.decoders.engine.sequence import Job, Policy

_ROWS = 128
"""Maximum positions per forward pass, each with a row of logits."""


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
        self._branch: Branch | None = None

    def propose(self) -> list[Chunk]:
        job, done = self._job, len(self._text.logprobs)
        if self._branch is None:
            self._branch = job.cache.fork(job.branch)
        chunk = self._tokens[done : done + _ROWS]
        start = len(self._branch)
        previous = self._tokens[done - 1] if done else job.prompt[-1]
        job.cache.extend(self._branch, [previous, *chunk[:-1]])  # the logits at a position predict the next token
        job.outputs[0].forwards += 1
        return [Chunk(self._branch, start, len(self._branch), [Raw()] * len(chunk) if self._top else chunk)]

    def commit(self, reads: list[list[Sampled]]) -> None:
        (rows,) = reads
        text = self._text
        if self._top:
            done = len(text.logprobs)
            for row, token in zip(rows, self._tokens[done : done + len(rows)], strict=True):
                assert row.logits is not None
                logprobs = log_softmax(row.logits)
                best = np.argsort(-logprobs, stable=True)[: self._top].tolist()
                text.logprobs.append(float(logprobs[token]))
                shown = best if token in best else [*best, token]
                text.top.append([(other, float(logprobs[other])) for other in shown])
        else:
            text.logprobs += [row.logprob for row in rows]
        if len(text.logprobs) == len(self._tokens):
            self._job.outputs[0].end("stop")
            self.release()

    def growth(self) -> int:
        return 1 + len(self._tokens) - len(self._text.logprobs)

    def release(self) -> None:
        if self._branch is not None:
            self._job.cache.release(self._branch)
