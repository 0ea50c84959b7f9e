"""BFS over thoughts: expand all kept states, evaluate the children, keep the b best; SEED, Algorithm 1 (after ToT)."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from tot.search.base import Search, by_value
from tot.search.problem import Problem


class BFS(Search):
    """Breadth-first search.

    `thoughts` (n) children of each of the `breadth` (b) best states, for `depth` (T) - 1 levels; the answer is asked at
    the best state of the last level. Terminal states stay in the running without being expanded.
    """

    thoughts: Annotated[int, Field(ge=1)] = 3
    breadth: Annotated[int, Field(ge=1)] = 3
    depth: Annotated[int, Field(ge=1)] | None = None
    """T; None takes the task's own."""

    async def run(self, problem: Problem) -> None:
        frontier = [problem.tree.root]
        for _ in range(1, self.depth or problem.task.depth):
            unfinished = [node for node in frontier if not node.terminal]
            if not unfinished or problem.out_of_budget():
                return
            children = await problem.expand(unfinished, self.thoughts)
            if not children or problem.meter.overspent():
                return
            await problem.evaluate(children)
            frontier = by_value([node for node in frontier if node.terminal] + children)[: self.breadth]
            if frontier[0].value is not None:
                problem.best = frontier[0]
