"""Log-probabilities of given tokens, one by one: a policy that feeds a text in chunks and reads, and draws nothing.

What it computes is cached and shared like any other text's. Knows nothing of HTTP.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from tot.decoders.engine.job import Companion, Job
from tot.decoders.engine.radix_cache import Branch
from tot.decoders.engine.runner import Chunk
from tot.decoders.engine.sampling import Raw, Sampled

_ROWS = 128
"""Positions read in one forward: a row of logits each."""


@dataclass(slots=True)
class Scores:
    """By token that was scored, in nats, by the model alone (before temperature and filters)."""

    logprobs: list[float] = field(default_factory=list)
    top: list[list[tuple[int, float]]] = field(default_factory=list)
    """The likeliest tokens at its place, likeliest first; as many as were asked for."""


class Scoring:
    """Scores `tokens` as the continuation of the request's prompt, into `scores`."""

    companion: Companion | None = None

    def __init__(self, job: Job, tokens: list[int], top: int, scores: Scores) -> None:
        self._job = job
        self._tokens = tokens
        self._top = top
        self._scores = scores
        self._branch: Branch | None = None

    def propose(self) -> list[Chunk]:
        job, done = self._job, len(self._scores.logprobs)
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
        scores = self._scores
        if self._top:
            done = len(scores.logprobs)
            logits = torch.stack([row.logits for row in rows if row.logits is not None])
            logprobs = logits.log_softmax(-1)
            chosen = torch.tensor(self._tokens[done : done + len(rows)], device=logits.device)
            scores.logprobs += logprobs.gather(1, chosen[:, None])[:, 0].tolist()
            best = logprobs.topk(min(self._top, logprobs.shape[1]))
            pairs = zip(best.indices.tolist(), best.values.tolist(), strict=True)
            scores.top += [list(zip(tokens, values, strict=True)) for tokens, values in pairs]
        else:
            scores.logprobs += [row.logprob for row in rows]
        if len(scores.logprobs) == len(self._tokens):
            self._job.outputs[0].end("stop")
            self.release()

    def growth(self) -> int:
        return 1 + len(self._tokens) - len(self._scores.logprobs)

    def release(self) -> None:
        if self._branch is not None:
            self._job.cache.release(self._branch)
