"""DFS over thoughts: follow the most valuable child, backtrack where values fall below the threshold.

ToT, Algorithm 2.
"""

from __future__ import annotations

from collections.abc import Sequence

from tot.search.base import Count, MergingSearch, SearchState, by_value
from tot.search.steps import Steps
from tot.tree.tree import Node


class DFS(MergingSearch):
    """Depth-first search.

    A state's children are evaluated together and visited in descending order of value. The search ends at the
    `goals`-th goal, or when the stack is empty, and answers from the most valuable goal. A goal is a terminal state
    that the task accepts as a solution. If the task defines no terminal states, every state at full depth is a goal.
    """

    expands = True
    thoughts: Count | None = 3
    """Number of children per state. None uses the generator's default."""
    threshold: float | None = None
    """Children with a lower value are pruned."""
    goals: Count = 1
    """Number of goals to find; the search answers from the best of them."""

    def steps(self, search: SearchState) -> Steps:
        stack = [search.tree.root]
        goals_found: list[Node] = []
        while stack:
            node = stack.pop()
            if node.pruned:
                continue
            if node.goal and node not in goals_found:
                goals_found.append(node)
                search.best = by_value(goals_found)[0]
                if len(goals_found) >= self.goals:
                    return
            if search.is_end(node):
                continue
            children = yield search.expand([node], self.thoughts)
            if search.solved is not None and self.goals == 1:
                search.best = search.solved
                return
            children = yield search.evaluate(children)
            retained = self._retain(children, search)
            if not goals_found and retained and _value(retained[0]) >= _value(search.best):
                search.best = retained[0]
            stack += retained[::-1]
        if not goals_found:
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
