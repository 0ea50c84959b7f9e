"""Monte Carlo tree search over thoughts: UCT and PUCT.

UCT: Kocsis and Szepesvári, 2006; on language models: RAP (Hao et al., 2023), Algorithm 1. PUCT: Silver et al., 2017.
"""

from __future__ import annotations

import math
from statistics import fmean
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, SerializeAsAny

from tot.evaluators.base import Evaluator
from tot.evaluators.combine import Combine
from tot.evaluators.heuristic import Confidence, Prior
from tot.evaluators.likelihood import Likelihood
from tot.generators.enumerate import Enumerate
from tot.generators.sample import Sample
from tot.search.base import Count, Search, SearchState
from tot.search.steps import Steps
from tot.task.task import Task
from tot.task.world import HasActions
from tot.tree.tree import Node


class MCTS(Search):
    """Monte Carlo tree search.

    An iteration follows the best children from the root to an unvisited or terminal state. A visited state is expanded
    when an iteration reaches it again (lazy expansion). The reward r of a state is its value plus the task's `reward`.
    Each state on the path receives `cum_reward` of the rewards from it to the end of the path. Q is the mean or the max
    of the received rewards (`calc_q`). The search ends as soon as the task verifies an answer, or when every state has
    been visited.
    """

    expands = True
    thoughts: Count | None = 3
    """Number of children per state. None uses the generator's default."""
    iterations: Count = 10
    rule: Literal["uct", "puct"] = "uct"
    """uct: Q + w sqrt(ln N_parent / N). puct: Q + w P sqrt(N_parent) / (1 + N), where P is the generator's prior."""
    exploration: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 1.0
    """w in the formulas of `rule`."""
    rollout: Literal["none", "greedy"] = "none"
    """none backpropagates the leaf's own value; greedy follows the best children to an end state."""
    cum_reward: Literal["sum", "mean"] = "mean"
    """How to aggregate the rewards of a path. mean keeps Q on the scale of the fast rewards of unvisited children."""
    calc_q: Literal["mean", "max"] = "mean"
    fast: Literal["evaluator"] | SerializeAsAny[Evaluator] | None = "evaluator"
    """Evaluator of all new children; its value is their Q until they are visited (RAP's fast reward).

    "evaluator" is the state evaluator; another evaluator may be cheaper. None evaluates states only when visited.
    """

    @property
    def fast_evaluator(self) -> Evaluator | None:
        return None if self.fast == "evaluator" else self.fast

    def steps(self, search: SearchState) -> Steps:
        return _Statistics(self, search).steps()


class _Statistics:
    """The statistics of one search."""

    def __init__(self, options: MCTS, search: SearchState) -> None:
        self.options = options
        self.search = search
        self.backed_up: dict[int, list[float]] = {}
        """The cumulative rewards that each node received."""
        self.children: dict[int, list[Node]] = {}
        """Children of every expanded state; empty at a dead end."""
        self.exhausted: set[int] = set()
        """Visited states below which every state was visited."""
        self.ends: list[tuple[float, Node]] = []
        """The cumulative reward and the last node of every path that reached an end state."""
        self.cumulate = math.fsum if options.cum_reward == "sum" else fmean

    def steps(self) -> Steps:
        search, done = self.search, 0
        yield from self._expand(search.tree.root)
        while done < self.options.iterations and not self.is_exhausted() and search.solved is None:
            path = self._select()
            leaf = path[-1]
            if leaf.visits:
                yield from self._expand(leaf)
                if (child := self._best_child(leaf, leaf.visits + 1)) is not None:
                    path.append(child)
            yield from self._evaluate(path[-1])
            if self.options.rollout != "none":
                yield from self._simulate(path)
            self._back_up(path)
            self._choose()
            done += 1
        if search.solved is not None:
            search.best = search.solved
        elif not self.ends and not search.tree.root.goal:
            search.stop(f"no terminal state was reached in {done} iterations")

    def is_exhausted(self) -> bool:
        """Return whether more visits would find nothing."""
        return not self.children.get(0) or 0 in self.exhausted

    def _select(self) -> list[Node]:
        """Follow the best children from the root to an unvisited state, or to one without children."""
        path = [self.search.tree.root]
        while (child := self._best_child(path[-1], path[-1].visits)) is not None:
            path.append(child)
            if not child.visits:
                break
        return path

    def _children(self, node: Node) -> list[Node]:
        return [child for child in self.children.get(node.id, ()) if not child.pruned]

    def _best_child(self, node: Node, visits: int) -> Node | None:
        """Return the child of a node with this number of visits that `rule` chooses."""
        children = self._children(node)
        return max(children, key=lambda child: self._urgency(child, node, max(visits, 1), len(children)), default=None)

    def _urgency(self, node: Node, parent: Node, above: int, siblings: int) -> float:
        q, exploration = _q(node), self.options.exploration
        if self.options.rule == "uct":
            return math.inf if q is None else q + exploration * math.sqrt(math.log(above) / max(node.visits, 1))
        if q is None:
            q = _q(parent) or 0.0
        prior = 1 / siblings if node.prior is None else node.prior
        return q + exploration * prior * math.sqrt(above) / (1 + node.visits)

    def _expand(self, node: Node) -> Steps:
        if self.search.is_end(node) or node.id in self.children:
            return
        children = yield self.search.expand([node], self.options.thoughts)
        self.children[node.id] = []
        fast = self.options.fast
        if fast is not None:
            children = yield self.search.evaluate(children, fast=fast != "evaluator")
        for child in children:
            if child.parent in self.children:
                self.children[child.parent].append(child)

    def _evaluate(self, node: Node) -> Steps:
        """Set the reward of a visited state: the value, evaluated if missing, plus the task's reward."""
        if node.reward is None and node.parent is not None:
            if node.value is None:
                yield self.search.evaluate([node])
            if node.value is not None:
                node.reward = node.value + self.search.checked.reward(self.search.tree.state(node))

    def _simulate(self, path: list[Node]) -> Steps:
        """Extend a path greedily to an end state."""
        while not self.search.is_end(path[-1]):
            yield from self._expand(path[-1])
            if not (children := self._children(path[-1])):
                break
            path.append(max(children, key=lambda child: _fast(child) or 0.0))
            yield from self._evaluate(path[-1])

    def _back_up(self, path: list[Node]) -> None:
        rewards: list[float] = []
        for node in reversed(path):
            if node.reward is not None and node.parent is not None:
                rewards.insert(0, node.reward)
            node.visits += 1
            children = self.children.get(node.id, () if self.search.is_end(node) else None)
            if children is not None and all(child.pruned or child.id in self.exhausted for child in children):
                self.exhausted.add(node.id)
            if rewards:
                known = self.backed_up.setdefault(node.id, [])
                known.append(self.cumulate(rewards))
                node.q = max(known) if self.options.calc_q == "max" else fmean(known)
        if rewards and self.search.is_end(path[-1]):
            self.ends.append((self.cumulate(rewards), path[-1]))

    def _choose(self) -> None:
        """Set `best` to the end of the path with the highest cumulative reward. Without one, follow the highest Q."""
        if self.ends:
            self.search.best = max(self.ends, key=lambda end: end[0])[1]
            return
        node = self.search.tree.root
        while visited := [child for child in self._children(node) if child.q is not None]:
            node = max(visited, key=lambda child: child.q or 0.0)
        self.search.best = node


def _q(node: Node) -> float | None:
    """Return Q, or the fast reward before the first visit."""
    return _fast(node) if node.q is None else node.q


def _fast(node: Node) -> float | None:
    return node.value if node.fast is None else node.fast


class RAP(MCTS):
    """MCTS with greedy rollouts, where the fast reward is Q until a child is visited.

    The reward depends on the task. Both rewards use the template `self_eval`:

    Actions (Blocksworld): half the action's log-likelihood, plus half the log of the model's own evaluation of it, plus
    the task's goal reward.
    Sub-questions (GSM8K): r_a^0.5 * r_b^0.5. r_a is the likelihood of Yes when asked whether the step is useful; r_b is
    the share of eight sampled sub-answers that agree.
    """

    few_shot: ClassVar[bool] = True

    def recipe(self, task: Task, generator: Any) -> dict[str, Any]:
        labels = task.labels or {"Yes": 1.0, "No": 0.0}
        self_eval = Likelihood(template="self_eval", labels=labels)
        given = {name: getattr(self, name) for name in self.model_fields_set}
        if isinstance(task, HasActions):
            options: dict[str, Any] = {"thoughts": None, "rollout": "greedy", "cum_reward": "sum", "calc_q": "mean"}
            return {
                "search": MCTS(**{**options, **given}),
                "generator": generator if isinstance(generator, Enumerate) else Enumerate(),
                "evaluator": Combine(evaluators=(Prior(), self_eval), weights=(0.5, 0.5), rule="log"),
            }
        options = {"thoughts": 4, "rollout": "greedy", "cum_reward": "mean", "calc_q": "max", "fast": self_eval}
        return {
            "search": MCTS(**{**options, **given}),
            "generator": Sample(samples=8),
            "evaluator": Combine(evaluators=(self_eval, Confidence()), weights=(0.5, 0.5), rule="product"),
        }
