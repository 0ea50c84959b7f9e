"""Acceptance rules: which drafted token is accepted, and which token replaces a rejected one.

Coupled: the target draws with its own seeded noise, and a drafted token is accepted if it equals the token drawn. The
output equals the output of `ar`, token for token.

Rejection: a candidate x drawn from q is accepted with probability min(1, p(x) / q(x)). Otherwise the next candidate is
tested against the residual of p (Leviathan et al., 2023, Algorithm 1, for one candidate; Yang et al., 2024, recursively
for several). The output has the target's distribution.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from tot.decoders.drafting.drafters import Draft
from tot.decoders.engine.sampling import Draw, Raw, Read, Sampled, distribution, noise_key, read

Array = np.ndarray[Any, np.dtype[np.float64]]
_ACCEPTANCE = 0x5DEECE66D1CE4E5B
"""Separates the noise of acceptance from the noise of drawing."""


class Coupled:
    """Accept a drafted token if the target draws the same one; lossless token for token."""

    coupled = True
    """Whether drafts must be drawn with the target's own noise."""

    def want(self, draw: Draw) -> Read:
        """Return the read for a position."""
        return draw

    def choose(self, sampled: Sampled, draw: Draw, draft: Draft, node: int) -> tuple[Sampled, int | None]:
        """Return the token after `node`, and the drafted child with that token, or None."""
        return sampled, draft.child(node, sampled.token)


class Rejection(Coupled):
    """Recursive rejection over the candidates, which were drawn from the draft without replacement."""

    coupled = False

    def want(self, draw: Draw) -> Read:
        return Raw()

    def choose(self, sampled: Sampled, draw: Draw, draft: Draft, node: int) -> tuple[Sampled, int | None]:
        assert sampled.logits is not None
        uniform = random.Random(noise_key(draw) ^ _ACCEPTANCE).random
        target = distribution(sampled.logits, draw)
        children = draft.children(node)
        tokens = [draft.tokens[child] for child in children]
        accepted, residual = reject(target, tokens, draft.weights.get(node), uniform)
        token = tokens[accepted] if accepted is not None else _draw_token(residual, uniform())
        logprob = read(sampled.logits[None], [token])[0].logprob
        return Sampled(token, logprob), None if accepted is None else children[accepted]


def reject(
    target: Array,
    candidates: Sequence[int],
    draft: Array | None,
    uniform: Callable[[], float],
) -> tuple[int | None, Array]:
    """Return the index of the accepted candidate, or None and the distribution to draw from instead.

    `target` p and `draft` q are (vocab,) probabilities; `candidates` were drawn from q in this order. Without q, the
    candidates are deterministic: each has a point distribution.
    """
    p, q = target, draft
    for index, x in enumerate(candidates):
        proposal = (np.arange(len(p)) == x).astype(np.float64) if q is None else q
        if uniform() * float(proposal[x]) < float(p[x]):  # u < p(x) / q(x)
            return index, p
        p = _normalised(np.maximum(p - proposal, 0.0), p)  # Leviathan et al., eq. 4
        if q is not None:
            q = q.copy()
            q[x] = 0.0
            q = _normalised(q, q)  # the next candidate was drawn from the rest
    return None, p


def _normalised(weights: Array, otherwise: Array) -> Array:
    total = weights.sum()
    return weights / total if float(total) > 0 else otherwise


def _draw_token(probabilities: Array, uniform: float) -> int:
    """Return the token at which the cumulative probability exceeds `uniform`."""
    cumulative = probabilities.cumsum(-1)
    token = int(np.searchsorted(cumulative, uniform * float(cumulative[-1]), side="right"))
    return min(token, int(probabilities.nonzero()[0][-1]))
