"""What a search is: options, and a coroutine that grows a problem's tree and leaves its best node behind."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

from pydantic import BaseModel, ConfigDict

from tot.search.problem import Problem
from tot.tree import Node


class Search(BaseModel):
    """Options of a search algorithm; `run` is the algorithm."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    @abstractmethod
    async def run(self, problem: Problem) -> None:
        """Grow `problem.tree`; keep `problem.best` at the best node so far: a search may be stopped any time."""


def by_value(nodes: Sequence[Node]) -> list[Node]:
    """Most valuable first; equals keep the order in which they came; nodes without a value come last."""
    return sorted(nodes, key=lambda node: float("inf") if node.value is None else -node.value)
