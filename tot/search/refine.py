"""Refine: try, look at what came of it, and mend. For tasks that act on their thoughts, each of which is a whole try.

A draft as the model is surest of it; where that is no solution, more drafts; then mendings of the best so far, for
which the task's template shows what was observed (Self-Debugging, Chen et al., 2023; Reflexion, Shinn et al., 2023).
"""

from __future__ import annotations

from tot.search.base import Count, Search, SearchState, by_value
from tot.search.steps import Steps
from tot.tree.tree import Node


class Refine(Search):
    """One draft, decoded greedily; then `thoughts` drafts; then as many mendings of the most valuable one, as long as a
    mending is better than what it mends, at most T - 2 times. It ends with the first solution."""

    whole = True
    greedy_draft = True
    thoughts: Count = 5

    def steps(self, search: SearchState) -> Steps:
        root = search.tree.root
        yield from self._tries(search, root, 1, whole=True)
        if not search.goals:
            yield from self._tries(search, root, self.thoughts)
        mended = root
        while not search.goals and search.best is not mended and search.best.depth < search.levels:
            mended = search.best
            yield from self._tries(search, mended, self.thoughts)

    @staticmethod
    def _tries(search: SearchState, node: Node, count: int, whole: bool = False) -> Steps:
        new = yield search.expand([node], count, whole)
        search.best = next(iter(search.goals), search.best)  # a budget may leave no more than that
        yield search.evaluate(new)
        tried = by_value([one for one in search.tree if one.parent is not None and not one.pruned])
        search.best = next(iter([*search.goals, *tried]), search.best)
