"""DFS over thoughts: follow the most valuable child, backtrack where values fall below the threshold.

ToT, Algorithm 2.
"""

from __future__ import annotations

from collections.abc import Sequence

from tot.search.base import Count, Search, SearchState, by_value
from tot.search.steps import Steps
from tot.tree.tree import Node


class DFS(Search):
    """Depth-first search.

    A state's children are evaluated together and visited in descending order of value. The search ends at the first
    goal, or when the stack is empty. A goal is a terminal state that the task accepts as a solution. If the task
    defines no terminal states, every state at full depth is a goal.
    """

    expands = merging = True
    thoughts: Count | None = 3
    """Number of children per state. None uses the generator's default."""
    threshold: float | None = None
    """Children with a lower value are pruned."""

    def steps(self, search: SearchState) -> Steps:
        stack = [search.tree.root]
        while stack:
            node = stack.pop()
            if node.goal and not node.pruned:
                search.best = node
                return
            if node.pruned or search.is_end(node):
                continue
            children = yield search.expand([node], self.thoughts)
            if search.solved is not None:
                search.best = search.solved
                return
            children = yield search.evaluate(children)
            retained = self._retain(children, search)
            if retained and _value(retained[0]) >= _value(search.best):
                search.best = retained[0]
            stack += retained[::-1]
        search.stop(f"no goal among {len(search.tree) - 1} thoughts")

    def _retain(self, children: Sequence[Node], search: SearchState) -> list[Node]:
        """Return the children to visit, in order, and prune the others."""
        retained = [child for child in by_value(children) if self.threshold is None or _value(child) >= self.threshold]
        for child in children:
            if child not in retained:
                search.tree.prune(child)
        return retained


def _value(node: Node) -> float:
    return float("-inf") if node.value is None else node.value
