"""Refine: propose a solution, execute it, and revise it. For tasks that execute thoughts that are whole solutions.

The search samples one greedy solution. If it fails, more are sampled, and then the best so far is revised. The task's
template shows the observations (Self-Debugging, Chen et al., 2023; Reflexion, Shinn et al., 2023).
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count

from tot.search.base import Count, Search, SearchState, by_value
from tot.search.steps import Fork, Steps
from tot.tree.tree import Node


class Refine(Search):
    """Sample one greedy solution, then `thoughts` solutions, then `thoughts` revisions of the most valuable one.

    Repeat the revisions as long as they improve the best solution, at most T - 2 times. Stop at the first goal.

    With the generator `Sample`, solutions and revisions are executed and evaluated when they end, and the first goal
    cancels the unfinished ones. An evaluator that compares, such as `Vote`, gets all of them together.
    """

    whole = True
    expands = True
    greedy_draft = True
    thoughts: Count = 5

    def steps(self, search: SearchState) -> Steps:
        root, numbers = search.tree.root, count()
        yield from self._attempt(search, root, 1, whole=True)
        if not search.goals:
            yield self._attempts(search, root, numbers)
        revised = root
        while not search.goals and search.best is not revised and search.best.depth < search.levels:
            revised = search.best
            yield self._attempts(search, revised, numbers)

    def _attempts(self, search: SearchState, node: Node, numbers: Iterator[int]) -> Fork:
        """Sample solutions or revisions, each in a branch of its own if nothing compares them."""
        if not search.resources.independent:
            return search.fork(self._attempt(search, node, self.thoughts))
        samples = [next(numbers) for _ in range(self.thoughts)]
        return search.fork(*(self._attempt(search, node, self.thoughts, sample=number) for number in samples))

    @staticmethod
    def _attempt(search: SearchState, node: Node, count: int, whole: bool = False, sample: int | None = None) -> Steps:
        """Sample solutions or revisions and evaluate them. Return True, which cancels the others, if one is a goal."""
        new = yield search.expand([node], count, whole, sample)
        search.best = next(iter(search.goals), search.best)  # the budget may end the search here
        yield search.evaluate(new)
        attempts = by_value([one for one in search.tree if one.parent is not None and not one.pruned])
        search.best = next(iter([*search.goals, *attempts]), search.best)
        return any(node.goal for node in new)
