"""AB-MCTS-A: adaptive branching Monte Carlo tree search with node aggregation (Inoue et al., 2025, section 3.3).

From the root, Thompson sampling decides at each node between a new child ("go wider") and one of its children ("go
deeper"), until a new thought is due. The posteriors are of the mean of the scores that each choice has led to.
"""

from __future__ import annotations

import math
import random
import sys
from collections import defaultdict
from collections.abc import Sequence

from tot.decoders.request import Purpose
from tot.search.base import Count, Search, SearchState, by_value
from tot.search.steps import Steps
from tot.tree.tree import Node

Score = float | None
"""A node's value; None for a failed thought, which counts as the worst."""


class ABMCTS(Search):
    """Adaptive branching MCTS. Values outside of [0, 1] are replaced by their ranks among all values.

    With a second model (`escalate`), Thompson sampling also decides which model writes each thought.
    """

    expands = True
    iterations: Count | None = None
    """Number of thoughts. None: 32 without a budget, no limit with one."""
    together: Count | None = None
    """How many thoughts are decoded at the same time. None uses the number that takes little more time than one."""

    @property
    def asks_second_model(self) -> bool:
        return True

    def steps(self, search: SearchState) -> Steps:
        run = _Scores(self, search)
        together = min(self.together or search.resources.cheap_samples, run.remaining)
        yield search.fork(*(run.steps() for _ in range(together)))


class _Scores:
    """The scores of one search."""

    def __init__(self, options: ABMCTS, search: SearchState) -> None:
        self.remaining = options.iterations or (sys.maxsize if search.resources.budgeted else 32)
        self._search = search
        self._selections = 0
        self._scores: list[Score] = []
        self._wider: defaultdict[int, list[Score]] = defaultdict(list)
        """By node: the scores of its own children."""
        self._deeper: defaultdict[int, list[Score]] = defaultdict(list)
        """By node: the scores of its children's descendants."""
        self._subtree: defaultdict[int, list[Score]] = defaultdict(list)
        """By node: its score and the scores of its descendants."""
        self._of_model: dict[Purpose, list[Score]] = {"generate": []}
        if search.resources.escalates:
            self._of_model["escalate"] = []

    def steps(self) -> Steps:
        """Add thoughts, one after another. Several of these generators run at the same time."""
        search = self._search
        while self.remaining > 0 and search.solved is None:
            self.remaining -= 1
            node, purpose = self.select()
            children = yield search.expand([node], 1, purpose=purpose)
            children = yield search.evaluate(children)
            self.observe(node, purpose, children)

    def select(self) -> tuple[Node, Purpose]:
        """Return the node after which to add a thought, and whose model writes it."""
        search = self._search
        self._selections += 1
        rng = search.random("ab-mcts", self._selections)
        scale = scaled(self._scores)
        node = search.tree.root
        while children := [one for one in search.tree.children(node) if not (one.pruned or search.is_end(one))]:
            deeper, wider = self._deeper[node.id], self._wider[node.id]
            if self._best(rng, scale, [wider, deeper]) == 0:
                break
            node = children[self._best(rng, scale, [self._subtree[child.id] for child in children])]
        purposes = list(self._of_model)
        chosen = self._best(rng, scale, list(self._of_model.values())) if len(purposes) > 1 else 0
        return node, purposes[chosen]

    def observe(self, node: Node, purpose: Purpose, children: Sequence[Node]) -> None:
        """Back up the score of a thought after `node`; without children it has failed."""
        search = self._search
        score = children[0].value if children else None
        self._scores.append(score)
        self._of_model[purpose].append(score)
        self._wider[node.id].append(score)
        if children:
            self._subtree[children[0].id].append(score)
            search.best = by_value([search.best, *children])[0] if search.best.parent is not None else children[0]
        for ancestor in search.tree.path(node)[1:]:
            self._subtree[ancestor.id].append(score)
            if ancestor.parent is not None:
                self._deeper[ancestor.parent].append(score)

    def _best(self, rng: random.Random, scale: dict[Score, float], choices: Sequence[Sequence[Score]]) -> int:
        """Return the index of the choice whose posterior has the highest draw."""
        draws = [_draw(rng, [scale[score] for score in scores]) for scores in choices]
        return max(range(len(draws)), key=draws.__getitem__)


def scaled(scores: Sequence[Score]) -> dict[Score, float]:
    """Return each score on a scale from 0 to 1: itself, or its rank if any score is outside of it."""
    known = sorted({score for score in scores if score is not None})
    if not known or (known[0] >= 0 and known[-1] <= 1):
        return {None: 0.0, **{score: score for score in known}}
    return {None: 0.0, **{score: (rank + 1) / len(known) for rank, score in enumerate(known)}}


def _draw(rng: random.Random, scores: Sequence[float]) -> float:
    """Draw a mean from the posterior of a normal-inverse-chi-squared prior (Murphy, 2023, section 3.4.3.3)."""
    n = len(scores)
    mean = math.fsum(scores) / n if n else 0.0
    squares = math.fsum((score - mean) ** 2 for score in scores)
    kappa, nu = 1 + n, 1 + n
    nu_tau_squared = 0.1 + squares + n * mean**2 / kappa  # prior: m = 0, kappa = nu = 1, tau^2 = 0.1
    variance = nu_tau_squared / 2 / rng.gammavariate(nu / 2, 1)
    return rng.gauss(n * mean / kappa, math.sqrt(variance / kappa))
