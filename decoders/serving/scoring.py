"""Score the tokens of a given text: a policy that feeds the text in chunks and reads logprobs, without sampling.

Its keys and values are cached and shared like all others. This module knows nothing of HTTP.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from scipy.special import log_softmax

from tot.decoders.engine.sampling import Sampled
from tot.decoders.engine.sequence import Job
from tot.decoders.methods.choices import Scoring


@dataclass(slots=True)
class Scored:
    """The tokens of one text and their logprobs (nats), before temperature and filters, filled in chunks."""

    tokens: list[int]
    unscored: int
    """Number of tokens at the start that are not scored."""
    logprobs: list[float] = field(default_factory=list)
    top: list[list[tuple[int, float]]] = field(default_factory=list)
    """At each scored position the most likely tokens, best first, and its own token, with their logprobs."""


class TextScoring(Scoring):
    """Scores a text's tokens after the unscored ones, as the continuation of the request's prompt."""

    def __init__(self, job: Job, text: Scored, top: int) -> None:
        super().__init__(job, [text.tokens[text.unscored :]], raw=top > 0)
        self._text = text
        self._top = top

    def take(self, number: int, row: Sequence[Sampled]) -> None:
        for one in row:
            self._add(one)

    def _add(self, row: Sampled) -> None:
        """Add the score of the next token."""
        text = self._text
        if row.logits is None:
            text.logprobs.append(row.logprob)
            return
        logprobs, token = log_softmax(row.logits), self._continuations[0][len(text.logprobs)]
        best = np.argsort(-logprobs, stable=True)[: self._top].tolist()
        text.logprobs.append(float(logprobs[token]))
        text.top.append([(i, float(logprobs[i])) for i in (best if token in best else [*best, token])])
