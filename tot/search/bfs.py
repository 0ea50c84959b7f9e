"""BFS over thoughts: expand the frontier, evaluate the children, keep the b best.

ToT, Algorithm 1; SEED, Algorithm 2.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

from tot.search.base import Count, Search, SearchState, by_value
from tot.search.steps import Steps
from tot.tree.tree import Node


class BFS(Search):
    """Breadth-first search.

    Expand each of the `breadth` (b) best states into `thoughts` (n) children, for `depth` (T) - 1 levels. Then answer
    from the best state of the last level. Terminal states stay in the frontier but are not expanded. A verified answer
    ends the search.
    """

    expands = merging = True
    thoughts: Count | None = 3
    """Number of children per state. None uses the generator's default."""
    breadth: Count = 3
    select: Literal["greedy", "sample", "all"] = "greedy"
    """How to select the frontier from the children.

    greedy  The b best; ties keep their order.
    sample  b states, sampled without replacement in proportion to their values.
    all     All of them. The root has b shares, and children divide the shares of their state. A state with s shares
            gets min(n, s) children. Branches are independent: each state is expanded when its text ends.
    """

    def steps(self, search: SearchState) -> Steps:
        if self.select == "all":
            yield from self._grow(search, search.tree.root, self.breadth)
            return
        frontier = [search.tree.root]
        while unfinished := [node for node in frontier if not search.is_end(node)]:
            children = yield search.expand(unfinished, self.thoughts)
            if search.solved is not None:
                search.best = search.solved
                return
            if not children:
                return
            children = yield search.evaluate(children)
            ended = [node for node in frontier if node.terminal and not node.pruned]
            selected = self._select([*ended, *children], search)
            frontier = search.emit("on_level", selected)
            best = next(iter(by_value(frontier)), None)
            if best is not None and (best.value is not None or search.best.value is None):
                search.best = best

    def _grow(self, search: SearchState, node: Node, shares: int) -> Steps:
        """Expand a state, and grow a branch from each child. Children divide the shares; the first get the rest."""
        if search.is_end(node):
            return
        children = yield search.expand([node], min(shares, self.thoughts or shares))
        if search.solved is not None:
            search.best = search.solved
            search.stop()
            return
        children = yield search.evaluate(children)
        children = search.emit("on_level", by_value(children)[:shares])
        best = by_value(search.complete())[0]
        if best.value is not None or search.best.value is None:
            search.best = best
        parts = [max(1, math.ceil((shares - number) / len(children))) for number in range(len(children))]
        yield search.fork(*(self._grow(search, child, part) for child, part in zip(children, parts, strict=True)))

    def _select(self, nodes: Sequence[Node], search: SearchState) -> list[Node]:
        if self.select != "sample":
            return by_value(nodes)[: self.breadth]
        left = list(nodes)
        rng = search.random("select", len(search.tree))
        selected: list[Node] = []
        while left and len(selected) < self.breadth:
            weights = [max(node.value or 0.0, 0.0) for node in left]
            if math.inf in weights:
                weights = [float(weight == math.inf) for weight in weights]
            if not any(weights):  # no positive value: sample uniformly
                weights = [1.0] * len(left)
            (chosen,) = rng.choices(range(len(left)), weights)
            selected.append(left.pop(chosen))
        return selected
