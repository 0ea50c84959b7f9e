"""Best-first search over thoughts: always expand the most promising state of the whole frontier.

It is A* (Hart, Nilsson and Raphael, 1968) if the task defines costs. Otherwise it uses the model's values or priors.
"""

from __future__ import annotations

import heapq
import math
from itertools import count
from typing import Any, Literal

from tot.decoders.errors import OptionError
from tot.generators.enumerate import Enumerate
from tot.search.base import Count, Search, SearchState
from tot.search.steps import Steps
from tot.task.task import Task
from tot.task.world import HasHeuristic, HasTerminal
from tot.tree.tree import Node


class BestFirst(Search):
    """Best-first search. `rank` sets the order of the queue:

    cost    f = g + h, from the task's `cost` and `heuristic` (A*). The first goal is the cheapest if h never
            overestimates and every action is tried. The model evaluates no states. If the generator enumerates all
            actions, the model scores no priors either.
    value   The state evaluator's value, highest first.
    prior   The depth divided by the probability of the path under the generator's priors (Levin tree search; Orseau et
            al., 2018). Likely paths come first, but every path is tried in the end.
    auto    cost if the task has a heuristic, otherwise value.

    The search ends at the first goal, or when the queue is empty. If the task defines terminal states, depth is
    unlimited unless `depth` is given.
    """

    expands = merging = True
    rank: Literal["auto", "cost", "value", "prior"] = "auto"
    thoughts: Count | None = None
    """Number of thoughts per state. None uses the generator's default; A* needs all actions."""
    batch: Count = 1
    """Number of states expanded together. More fill a batch better, but some may be wasted."""

    def evaluates(self, task: Task) -> bool:
        return self._rank_for(task) == "value"

    def check(self, task: Task) -> None:
        if self.rank == "cost" and not isinstance(task, HasHeuristic):
            raise OptionError(
                f"best-first:rank=cost needs the task's `heuristic`, which {type(task).__name__} does not define: "
                "define it, or choose search='best-first:rank=value'"
            )

    def recipe(self, task: Task, generator: Any) -> dict[str, Any]:
        if self._rank_for(task) == "cost" and self.thoughts is None and isinstance(generator, Enumerate):
            return {"generator": generator.model_copy(update={"prior": "uniform"})}
        return {}

    def depth_for(self, task: Task) -> int | None:
        return self.depth if self.depth is not None or isinstance(task, HasTerminal) else task.depth

    def steps(self, search: SearchState) -> Steps:
        rank, order = self._rank_for(search.task), count()
        queue: list[tuple[float, int, Node]] = []
        closest = math.inf

        def push(node: Node) -> None:
            nonlocal closest
            priority, distance = self._priority(rank, node, search)
            heapq.heappush(queue, (priority, next(order), node))
            if distance < closest or search.best.pruned:
                closest, search.best = distance, node

        push(search.tree.root)
        while queue:
            batch: list[Node] = []
            while queue and len(batch) < self.batch:
                node = queue[0][-1]
                if node.goal and not node.pruned:
                    if batch:
                        break  # the states in the batch may still lead to a cheaper goal
                    search.best = node
                    return
                heapq.heappop(queue)
                if not (node.pruned or search.is_end(node)):
                    batch.append(node)
            children = yield search.expand(batch, self.thoughts)
            if search.solved is not None and rank != "cost":
                search.best = search.solved
                return
            if rank == "value":
                children = yield search.evaluate(children)
            for child in children:
                push(child)
        search.stop(f"no goal: the queue is empty after {len(search.tree) - 1} thoughts")

    def _rank_for(self, task: Task) -> str:
        if self.rank != "auto":
            return self.rank
        return "cost" if isinstance(task, HasHeuristic) else "value"

    def _priority(self, rank: str, node: Node, search: SearchState) -> tuple[float, float]:
        """Return the queue's sort key and the estimated distance to a goal; lowest first."""
        if rank == "cost":
            distance = search.checked.heuristic(search.tree.state(node))
            return node.cost + distance, distance
        if rank == "value":
            distance = math.inf if node.value is None else -node.value
            return distance, distance
        path = search.tree.path(node)[1:]
        if any(step.prior is None for step in path):
            raise OptionError("rank=prior needs a thought generator that returns priors: use Enumerate() or Sample()")
        log_probability = sum(math.log(max(step.prior or 0.0, 1e-30)) for step in path)
        return math.log(max(node.depth, 1)) - log_probability, -float(node.depth)
