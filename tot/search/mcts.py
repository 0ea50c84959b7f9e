"""Monte Carlo tree search over thoughts: UCT and PUCT, with several leaves gathered at once.

UCT: Kocsis and Szepesvári, 2006; on language models: RAP (Hao et al., 2023), Algorithm 1. PUCT: Silver et al., 2017.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from statistics import fmean
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field

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

Rewards = Callable[[Sequence[float]], float]
_CUMULATE: dict[str, Rewards] = {"sum": math.fsum, "mean": fmean, "max": max}


class MCTS(Search):
    """Monte Carlo tree search.

    An iteration follows the best children from the root to a state that was not visited yet, or to one that ends. A
    visited state is expanded when the search next comes through it (lazy expansion). The reward r of a state is its
    value plus the task's own `reward`; what is backed up to a state is `cum_reward` of the rewards from it to the end
    of the path; Q is the mean or the max of what was backed up (`calc_q`). It ends as soon as the task verifies an
    answer.
    """

    thoughts: Count | None = 3
    """Children of a state; None: as many as the thought generator gives of itself."""
    iterations: Count = 10
    rule: Literal["uct", "puct"] = "uct"
    """uct: Q + w sqrt(ln N_parent / N). puct: Q + w P sqrt(N_parent) / (1 + N), P being the generator's prior."""
    exploration: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 1.0
    """w"""
    leaves: Count = 1
    """Leaves gathered before their calls are made, all in one batch. Until its reward is known, a gathered visit counts
    as one that gave the worst reward so far (virtual loss)."""
    rollout: Literal["none", "greedy"] = "none"
    """none backs up the leaf's own value; greedy goes on by the best child to an end."""
    cum_reward: Literal["sum", "mean", "max"] | Rewards = "mean"
    """mean keeps Q on the scale of a single value, and so of the fast rewards that unvisited children compete with."""
    calc_q: Literal["mean", "max"] = "mean"
    fast: Any = "evaluator"
    """What judges new children, all at once: their Q until they are visited (RAP's fast reward). "evaluator" is the
    state evaluator itself; another evaluator may be cheaper; None judges only what is visited, in the order of search.
    """

    def resolved(self, find: Callable[[Any], Any]) -> Self:
        own = self.fast not in (None, "evaluator")
        return self.model_copy(update={"fast": find(self.fast)}) if own else self

    @property
    def fast_evaluator(self) -> Evaluator | None:
        return None if self.fast == "evaluator" else self.fast

    def steps(self, search: SearchState) -> Steps:
        return _Run(self, search).steps()


class _Run:
    """What one search learns as it goes."""

    def __init__(self, options: MCTS, search: SearchState) -> None:
        self.options = options
        self.search = search
        self.backed_up: dict[int, list[float]] = {}
        self.children: dict[int, list[Node]] = {}
        """Of every expanded state; none where there is no way on."""
        self.pending: Counter[int] = Counter()
        """Visits under way."""
        self.worst: float | None = None
        self.ends: list[tuple[float, Node]] = []
        """The cumulative reward of every path that reached an end, and that end."""
        cumulate = options.cum_reward
        self.cumulate = _CUMULATE[cumulate] if isinstance(cumulate, str) else cumulate

    def steps(self) -> Steps:
        options, search = self.options, self.search
        yield from self._expand([search.tree.root])
        done = 0
        while done < options.iterations and self.children.get(0) and search.solved is None:
            paths = self._gather(min(options.leaves, options.iterations - done))
            yield from self._expand([path[-1] for path in paths if path[-1].visits and not self._is_tip(path[-1])])
            for path in paths:
                if path[-1].visits and (child := self._best_child(path[-1])) is not None:
                    path.append(child)
            yield from self._judge([path[-1] for path in paths])
            if options.rollout != "none":
                yield from self._roll_out(paths)
            self.pending.clear()
            for path in paths:
                self._back_up(path)
            done += len(paths)
            self._choose()
        if search.solved is not None:
            search.best = search.solved
        elif not self.ends and not search.tree.root.goal:
            search.stop(f"no terminal state was reached in {done} iterations")

    def _gather(self, wanted: int) -> list[list[Node]]:
        """Paths to different leaves, each chosen as if those before it had come back with the worst reward."""
        paths: list[list[Node]] = []
        while len(paths) < wanted:
            path = [self.search.tree.root]
            while (child := self._best_child(path[-1])) is not None:
                path.append(child)
                if not child.visits:
                    break
            if any(path[-1] is other[-1] for other in paths):
                break
            self.pending.update(node.id for node in path)
            paths.append(path)
        return paths

    def _best_child(self, node: Node) -> Node | None:
        children = [child for child in self.children.get(node.id, ()) if not child.pruned]
        return max(children, key=lambda child: self._urgency(child, node, len(children)), default=None)

    def _urgency(self, node: Node, parent: Node, siblings: int) -> float:
        options = self.options
        visits = node.visits + self.pending[node.id]
        above = max(parent.visits + self.pending[parent.id], 1)
        q = self._q(node)
        if options.rule == "uct":
            if q is None:
                return math.inf
            return q + options.exploration * math.sqrt(math.log(above) / max(visits, 1))
        if q is None:
            q = self._q(parent) or 0.0
        prior = 1 / siblings if node.prior is None else node.prior
        return q + options.exploration * prior * math.sqrt(above) / (1 + visits)

    def _q(self, node: Node) -> float | None:
        """Q, where a visit under way gave the worst reward so far; the fast reward before the first visit."""
        known = self.backed_up.get(node.id, [])
        pending = self.pending[node.id]
        if not known and not pending:
            return _fast(node)
        if self.options.calc_q == "max" and known:
            return max(known)
        return (math.fsum(known) + pending * (self.worst or 0.0)) / (len(known) + pending)

    def _is_tip(self, node: Node) -> bool:
        return self.search.is_end(node) or node.id in self.children

    def _expand(self, nodes: Sequence[Node]) -> Steps:
        open_nodes = [node for node in nodes if not self._is_tip(node)]
        children = yield self.search.expand(open_nodes, self.options.thoughts)
        self.children |= {node.id: [] for node in open_nodes}
        fast = self.options.fast
        if fast is not None:
            children = yield self.search.evaluate(children, fast=fast != "evaluator")
        for child in children:
            if child.parent in self.children:
                self.children[child.parent].append(child)

    def _judge(self, nodes: Sequence[Node]) -> Steps:
        """The rewards of visited states: their values, asked for where they are not known, plus the task's reward."""
        unknown = [node for node in nodes if node.reward is None and node.parent is not None]
        yield self.search.evaluate([node for node in unknown if node.value is None])
        for node in unknown:
            if node.value is not None:
                node.reward = node.value + self.search.reward(node)

    def _roll_out(self, paths: Sequence[list[Node]]) -> Steps:
        """Extend every path to an end, all of them a level at a time."""
        before = [len(path) for path in paths]
        growing = [path for path in paths if not self.search.is_end(path[-1])]
        while growing:
            yield from self._expand([path[-1] for path in growing])
            moved = []
            for path in growing:
                if (child := self._simulated_child(path[-1])) is not None:
                    path.append(child)
                    moved.append(path)
            yield from self._judge(list({path[-1].id: path[-1] for path in moved}.values()))
            growing = [path for path in moved if not self.search.is_end(path[-1])]
        for path, length in zip(paths, before, strict=True):
            self.search.emit("on_simulate", path[length - 1 :])

    def _simulated_child(self, node: Node) -> Node | None:
        children = [child for child in self.children.get(node.id, ()) if not child.pruned]
        return max(children, key=lambda child: _fast(child) or 0.0, default=None)

    def _back_up(self, path: list[Node]) -> None:
        rewards: list[float] = []
        total = None
        for node in reversed(path):
            if node.reward is not None and node.parent is not None:
                rewards.insert(0, node.reward)
            node.visits += 1
            if rewards:
                total = float(self.cumulate(rewards))
                known = self.backed_up.setdefault(node.id, [])
                known.append(total)
                node.q = max(known) if self.options.calc_q == "max" else fmean(known)
                self.worst = total if self.worst is None else min(self.worst, total)
        if total is not None and self.search.is_end(path[-1]):
            self.ends.append((total, path[-1]))
        self.search.emit("on_backpropagate", path)

    def _choose(self) -> None:
        """Leave behind the end of the path with the highest cumulative reward; before there is one, where Q leads."""
        if self.ends:
            self.search.best = max(self.ends, key=lambda end: end[0])[1]
            return
        node = self.search.tree.root
        while visited := [
            child for child in self.children.get(node.id, ()) if child.q is not None and not child.pruned
        ]:
            node = max(visited, key=lambda child: child.q or 0.0)
        self.search.best = node


def _fast(node: Node) -> float | None:
    return node.value if node.fast is None else node.fast


class RAP(MCTS):
    """MCTS with greedy rollouts, where fast rewards stand for Q until a child is visited.

    With a world (Blocksworld): the action's log-likelihood and the log of the model's own judgement of it, half each,
    plus the task's goal reward. By sub-questions (GSM8K): the likelihood of Yes when asked whether the step is useful,
    and the share of eight sampled sub-answers that agree, as r_a^0.5 * r_b^0.5. Both ask the template `self_eval`.
    """

    few_shot: ClassVar[bool] = True

    def recipe(self, task: Task, generator: Any) -> dict[str, Any]:
        labels = task.labels or {"Yes": 1.0, "No": 0.0}
        judged = Likelihood(template="self_eval", labels=labels)
        given = {name: getattr(self, name) for name in self.model_fields_set}
        if isinstance(task, HasActions):
            options: dict[str, Any] = {"thoughts": None, "rollout": "greedy", "cum_reward": "sum", "calc_q": "mean"}
            return {
                "search": MCTS(**{**options, **given}),
                "generator": generator if isinstance(generator, Enumerate) else Enumerate(),
                "evaluator": Combine(evaluators=(Prior(), judged), weights=(0.5, 0.5), rule="log"),
            }
        options = {"thoughts": 4, "rollout": "greedy", "cum_reward": "mean", "calc_q": "max", "fast": judged}
        return {
            "search": MCTS(**{**options, **given}),
            "generator": Sample(samples=8),
            "evaluator": Combine(evaluators=(judged, Confidence()), weights=(0.5, 0.5), rule="product"),
        }
