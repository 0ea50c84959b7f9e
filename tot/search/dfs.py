"""DFS over thoughts: follow the most valuable child, turn back where a state is not worth going on.

ToT, Algorithm 2.
"""

from __future__ import annotations

from collections.abc import Sequence

from tot.search.base import Count, MergingSearch, SearchState, by_value
from tot.search.steps import Steps
from tot.tree.tree import Node


class DFS(MergingSearch):
    """Depth-first search.

    A state's children are valued together and visited most valuable first. The search ends at its `goals`-th goal,
    answering from the most valuable of them, or when nothing is left. A goal is a terminal state that the task takes
    for a solution; where the task names no terminal states, every state at full depth.
    """

    thoughts: Count | None = 3
    """Children asked for at a state; None: as many as the thought generator gives of itself."""
    threshold: float | None = None
    """Children of lower value are pruned."""
    goals: Count = 1
    """1 stops at the first goal; k takes the best of k."""

    def steps(self, search: SearchState) -> Steps:
        stack = [search.tree.root]
        found: list[Node] = []
        while stack:
            node = stack.pop()
            if node.pruned:
                continue
            if node.goal and node not in found:
                found.append(node)
                search.best = by_value(found)[0]
                if len(found) >= self.goals:
                    return
            if search.is_end(node):
                continue
            children = yield search.expand([node], self.thoughts)
            if search.solved is not None and self.goals == 1:
                search.best = search.solved
                return
            children = yield search.evaluate(children)
            worth = self._worth(children, search)
            if not found and worth and _value(worth[0]) >= _value(search.best):
                search.best = worth[0]
            stack += worth[::-1]
        if not found:
            search.stop(f"no goal among {len(search.tree) - 1} thoughts")

    def _worth(self, children: Sequence[Node], search: SearchState) -> list[Node]:
        """The children to visit, in order; the others are pruned."""
        kept = [child for child in by_value(children) if self.threshold is None or _value(child) >= self.threshold]
        for child in children:
            if child not in kept:
                search.tree.prune(child)
        return kept


def _value(node: Node) -> float:
    return float("-inf") if node.value is None else node.value
