"""BFS over thoughts: expand all kept states, evaluate the children, keep the b best.

ToT, Algorithm 1; SEED, Algorithm 1.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

from tot.search.base import Count, MergingSearch, SearchState, by_value
from tot.search.steps import Steps
from tot.tree.tree import Node


class BFS(MergingSearch):
    """Breadth-first search.

    `thoughts` (n) children of each of the `breadth` (b) best states, for `depth` (T) - 1 levels; the answer is asked at
    the best state of the last level. Terminal states stay in the running without being expanded; a state whose answer
    the task verifies ends the search.
    """

    thoughts: Count | None = 3
    """None: as many as the thought generator gives of itself."""
    breadth: Count = 3
    select: Literal["greedy", "sample", "all"] = "greedy"
    """The b best, the first of equals first; b drawn without replacement, by value; or all, of which no more are grown
    than b: up to n children of a state while there is room for them, then one of each."""

    def steps(self, search: SearchState) -> Steps:
        frontier = [search.tree.root]
        while unfinished := [node for node in frontier if not search.is_end(node)]:
            children = yield search.expand(unfinished, self._count(unfinished, frontier))
            if search.solved is not None:
                search.best = search.solved
                return
            if not children:
                return
            children = yield search.evaluate(children)
            ended = [node for node in frontier if node.terminal and node not in children]
            kept = self._keep([*ended, *children], search)
            frontier = search.emit("on_level", kept)
            best = next(iter(by_value(frontier)), None)
            if best is not None and best.value is not None:
                search.best = best

    def _count(self, unfinished: Sequence[Node], frontier: Sequence[Node]) -> int | None:
        """Children of each state."""
        if self.select != "all":
            return self.thoughts
        room = max(1, (self.breadth - len(frontier) + len(unfinished)) // len(unfinished))
        return min(room, self.thoughts or room)

    def _keep(self, nodes: Sequence[Node], search: SearchState) -> list[Node]:
        if self.select != "sample":
            return by_value(nodes)[: self.breadth]
        left = list(nodes)
        draw = search.random("select", len(search.tree))
        kept: list[Node] = []
        while left and len(kept) < self.breadth:
            weights = [max(node.value or 0.0, 0.0) for node in left]
            if math.inf in weights:
                weights = [float(weight == math.inf) for weight in weights]
            if not any(weights):  # nothing is worth more than nothing: all are equal
                weights = [1.0] * len(left)
            (chosen,) = draw.choices(range(len(left)), weights)
            kept.append(left.pop(chosen))
        return kept
