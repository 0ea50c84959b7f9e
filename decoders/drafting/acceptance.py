"""Acceptance rules: which drafted token is taken, and what is drawn in its place where none is.

Coupled: the target draws with its own seeded noise, and a drafted token is taken where it is the one drawn: the output
is that of `ar`, token for token. Rejection: a candidate x drawn from q is taken with probability min(1, p(x) / q(x)),
else the next is tried against what is left of p (Leviathan et al., 2023, Algorithm 1, for one candidate; Yang et al.,
2024, recursively for several): the output's distribution is the target's.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from tot.decoders.drafting.drafters import Draft
from tot.decoders.engine.sampling import Draw, Raw, Read, Sampled, distribution, noise_key

_ACCEPTANCE = 0x5DEECE66D1CE4E5B
"""Keeps the noise of accepting apart from that of drawing."""


class Coupled:
    """Equality with what the target draws; lossless token for token."""

    coupled = True
    """Drafts are to be drawn with the target's own noise."""

    def want(self, draw: Draw) -> Read:
        """What to read at a position."""
        return draw

    def choose(self, sampled: Sampled, draw: Draw, draft: Draft, node: int) -> tuple[Sampled, int | None]:
        """The token after `node`, and which of its drafted children it is, if it is one."""
        taken = (child for child in draft.children(node) if draft.tokens[child] == sampled.token)
        return sampled, next(taken, None)


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
        taken, left = reject(target, tokens, draft.weights.get(node), uniform)
        token = tokens[taken] if taken is not None else _drawn(left, uniform())
        logprob = float(sampled.logits[token] - sampled.logits.logsumexp(-1))
        return Sampled(token, logprob, states=sampled.states), None if taken is None else children[taken]


def reject(
    target: Tensor,
    candidates: Sequence[int],
    draft: Tensor | None,
    uniform: Callable[[], float],
) -> tuple[int | None, Tensor]:
    """Which candidate is accepted, and the distribution to draw from where none is.

    `target` p and `draft` q are (vocab,) probabilities; `candidates` were drawn from q in this order. No q: they were
    chosen without chance, each from a distribution that holds nothing else.
    """
    p, q = target, draft
    for place, x in enumerate(candidates):
        if q is None:
            point = torch.zeros_like(p)
            point[x] = 1.0
        now = point if q is None else q
        if uniform() * float(now[x]) < float(p[x]):  # u < p(x) / q(x)
            return place, p
        p = _normalised((p - now).clamp_(min=0.0), p)  # Leviathan et al., eq. 4
        if q is not None:
            q = q.clone()
            q[x] = 0.0
            q = _normalised(q, q)  # the next one was drawn from what was left
    return None, p


def _normalised(weights: Tensor, otherwise: Tensor) -> Tensor:
    total = weights.sum()
    return weights / total if float(total) > 0 else otherwise


def _drawn(probabilities: Tensor, uniform: float) -> int:
    """The token at which the cumulated probability passes `uniform`."""
    cumulated = probabilities.cumsum(-1)
    place = int(torch.searchsorted(cumulated, uniform * float(cumulated[-1]), right=True))
    likely = probabilities.nonzero()[:, 0]
    return int(likely[-1]) if place > int(likely[-1]) else place
