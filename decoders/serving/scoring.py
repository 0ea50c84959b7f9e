"""Log-probabilities of given tokens, one by one: a policy that feeds a text in chunks and reads, and draws nothing.

What it computes is cached and shared like any other text's. Knows nothing of HTTP.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from tot.decoders.engine.radix_cache import Branch
from tot.decoders.engine.runner import Chunk
from tot.decoders.engine.sampling import Raw, Sampled
from tot.decoders.engine.sequence import Job, Policy

_ROWS = 128
"""Positions read in one forward: a row of logits each."""


@dataclass(slots=True)
class Scored:
    """The tokens of one text and, as they come to be scored, what the model alone says of them, in nats (before
    temperature and filters)."""

    tokens: list[int]
    unscored: int
    """So many of them, at the beginning, have nothing before them."""
    logprobs: list[float] = field(default_factory=list)
    top: list[list[tuple[int, float]]] = field(default_factory=list)
    """The likeliest tokens at its place, likeliest first; as many as were asked for."""


class Scoring(Policy):
    """Scores the rest of a text's tokens as the continuation of the request's prompt."""

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
        before = self._tokens[done - 1] if done else job.prompt[-1]
        job.cache.extend(self._branch, [before, *chunk[:-1]])  # logits at a position are about the token after it
        job.outputs[0].forwards += 1
        return [Chunk(self._branch, start, len(self._branch), [Raw()] * len(chunk) if self._top else chunk)]

    def commit(self, reads: list[list[Sampled]]) -> None:
        (rows,) = reads
        text = self._text
        if self._top:
            done = len(text.logprobs)
            logits = torch.stack([row.logits for row in rows if row.logits is not None])
            logprobs = logits.log_softmax(-1)
            chosen = torch.tensor(self._tokens[done : done + len(rows)], device=logits.device)
            text.logprobs += logprobs.gather(1, chosen[:, None])[:, 0].tolist()
            best = logprobs.topk(min(self._top, logprobs.shape[1]))
            pairs = zip(best.indices.tolist(), best.values.tolist(), strict=True)
            text.top += [list(zip(tokens, values, strict=True)) for tokens, values in pairs]
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
