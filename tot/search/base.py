"""Search: a search algorithm and its options; SearchState: one search over one tree, driven by `ask` and `tell`.

A SearchState applies thoughts to the task's world, merges equal states, finds goals and calls the hooks. It calls no
model: a Run drives it with a model, and a user's program can drive it by hand.
"""

from __future__ import annotations

import logging
import math
import random
from abc import abstractmethod
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field

from tot.decoders.errors import TaskError
from tot.decoders.request import Purpose
from tot.evaluators.base import Evaluator
from tot.llm.context import derive
from tot.llm.replies import as_evaluation, as_proposal, as_proposals
from tot.running import run_to_end
from tot.search.calibration import Calibration
from tot.search.growth import SearchTree
from tot.search.hooks import Hooks
from tot.search.steps import Branches, Evaluate, Expand, Fork, Step, Steps
from tot.search.votes import Ballot, cast
from tot.task.checked import CheckedTask
from tot.task.task import Task
from tot.task.world import HasActions
from tot.tree.thought import State, Thought
from tot.tree.tree import Node

log = logging.getLogger(__name__)

_IDLE = 10_000
"""Maximum number of steps in a row that add no node."""
WRITERS: tuple[Purpose, ...] = ("generate", "escalate")
"""Whose decoders write thoughts: the first model's, then the larger model's."""
Count = Annotated[int, Field(ge=1)]


@dataclass(frozen=True, slots=True)
class Resources:
    """Properties of the model and the parts that execute the steps of a search."""

    cheap_samples: int = 8
    """Number of samples that take little more time together than one."""
    escalates: bool = False
    """Whether a larger model can be asked (purpose "escalate")."""
    budgeted: bool = False
    """Whether there is a budget."""
    distinct: int | None = None
    """Number of different whole solutions, if they are decoded greedily."""
    independent: bool = False
    """Whether the thoughts of a node can be sampled and evaluated one by one (`Expand.sample`)."""
    calibrations: Mapping[Purpose, Calibration] = field(default_factory=dict)
    """Of the models that write thoughts, if they are calibrated for the task."""


class Search(BaseModel):
    """Options of a search algorithm. `steps` implements the algorithm; `start` begins a search."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    few_shot: ClassVar[bool] = False
    """Whether the search is designed for few-shot prompts in the papers' form."""
    whole: ClassVar[bool] = False
    """Whether the search samples whole solutions in one completion."""
    greedy_draft: ClassVar[bool] = False
    """Whether a single whole solution is decoded greedily, regardless of the temperature."""
    expands: ClassVar[bool] = False
    """Whether the thought generator extends unfinished states. The parts of such a search are checked on the task."""
    wanders: ClassVar[bool] = False
    """Whether a path may return to a state that it has already visited."""
    merging: ClassVar[bool] = False
    """Whether equal states of a world are merged, wherever they are in the tree (a graph of thoughts)."""
    depth: Count | None = None
    """T: T - 1 levels of thoughts, then the answer. None uses the task's depth."""
    aggregate: Literal["best", "vote", "majority"] = "best"
    """How to pick the answer: from the best state, or by a vote of all complete states.

    Votes are weighted by the states' values ("vote") or count once per state ("majority").
    """

    def start(
        self,
        task: Task,
        question: str | State,
        *,
        seed: int = 0,
        hooks: object | None = None,
        resources: Resources | None = None,
    ) -> SearchState:
        """Start this search at the root of a new tree; drive it with `ask` and `tell`.

        `hooks` are described in `tot.search.hooks`.
        """
        return SearchState(self, task, question, seed=seed, hooks=hooks, resources=resources)

    @abstractmethod
    def steps(self, search: SearchState) -> Steps:
        """Yield the next step. Keep `search.best` up to date: a search may be stopped at any time."""

    def recipe(self, task: Task, generator: Any) -> dict[str, Any]:
        """Return the parts that this search replaces for a task and its generator.

        The keys are "search", "generator" and "evaluator".
        """
        return {}

    def evaluates(self, task: Task) -> bool:
        """Return whether the search needs values of states."""
        return self.expands

    @property
    def asks_second_model(self) -> bool:
        """Whether the search can ask a second model (`escalate`)."""
        return False

    def check(self, task: Task) -> None:
        """Raise OptionError or TaskError if the task lacks a method or a template that it needs."""
        if not self.whole:
            return
        if solutions := getattr(self, "solutions", ()):
            task.prompts.require(*solutions)
        elif isinstance(task, HasActions):
            task.prompts.require("chain")
        elif "chain" not in task.prompts:  # a solution is one thought, and then the answer
            task.prompts.require(*task.thought)

    def elect(self, search: SearchState, answered: Sequence[tuple[Node, Any]]) -> tuple[list[Ballot], list[int]]:
        """Return the ballots of nodes with their answers, and the indices of the winning ones."""
        return cast(search.checked, search.tree.question, answered, self.aggregate == "majority")

    @property
    def fast_evaluator(self) -> Evaluator | None:
        """The cheap evaluator of new nodes, if it differs from the state evaluator."""
        return None

    def depth_for(self, task: Task) -> int | None:
        """Return T for a task; None means no limit."""
        return self.depth or task.depth

    def merges(self, root: State) -> bool:
        """Return whether equal states of a tree with this root are merged."""
        return self.merging and root.world is not None


def by_value(nodes: Sequence[Node]) -> list[Node]:
    """Sort nodes by value, highest first. The sort is stable; nodes without a value come last."""
    return sorted(nodes, key=lambda node: float("inf") if node.value is None else -node.value)


class SearchState(SearchTree):
    """A running search, created by `BFS(thoughts=2).start(task, "question")`.

    while (step := search.ask()) is not None:
        if isinstance(step, Expand):
            search.tell([my_thoughts(state) for state in step.states])  # some texts for each state
        else:
            search.tell([my_value(state) for state in step.states])  # a number for each state
    search.best, search.tree
    """

    def __init__(
        self,
        options: Search,
        task: Task,
        question: str | State,
        *,
        seed: int = 0,
        hooks: object | None = None,
        resources: Resources | None = None,
    ) -> None:
        root = question if isinstance(question, State) else CheckedTask(task).start(question)
        depth = options.depth_for(task)
        super().__init__(
            task,
            root,
            levels=math.inf if depth is None else depth - 1,
            merge=options.merges(root),
            wanders=options.wanders,
            accepts=lambda node: bool(self.emit("on_goal", [node])),
        )
        if self.levels < 1 and not options.whole:
            _warn_of_depth()
        self.options = options
        self.resources = resources or Resources()
        self.best: Node = self.tree.root
        """The node that the search would currently answer from."""
        self.voting: Purpose = "generate"
        """The model whose answers vote."""
        self.stopped: str | None = None
        """Why the search ended early or without a goal, if it did."""
        self._seed = seed
        self._hooks = None if hooks is None else Hooks(hooks)
        self._turns: defaultdict[int, int] = defaultdict(int)
        """By node: how often it was expanded."""
        self._steps: Counter[int] = Counter()
        """Number of steps, by the size of the tree."""
        self._branches = Branches(type(options).__name__, options.steps(self), self._prepare)
        self.check_end(self.tree.root, root)

    def ask(self) -> Step | None:
        """Return the next step, or None if the search has ended. Repeats the step until `tell` gets its results."""
        return next(iter(self.pending()), None)

    def pending(self) -> list[Step]:
        """Return the next step of every branch. They can run at the same time; `tell` takes them in any order."""
        self._branches.advance()
        if not isinstance(self.best, Node):
            name = type(self.options).__name__
            raise TaskError(f"{name} set search.best to {self.best!r:.60}: set it to a node")
        if self._branches.stopped:
            return []
        steps = self._branches.pending
        self._branches.stopped = not steps
        if not steps and self.stopped is None and self._has_terminal and not self.goals:
            self.stopped = f"no goal among {len(self.tree) - 1} thoughts"
        return steps

    def _prepare(self, step: Step | Fork) -> Step | Fork:
        """Call the hooks of an expansion, and number it. Stop the search after many steps that add no node."""
        if isinstance(step, Expand):
            nodes = self.emit("on_select", [node for node in step.nodes if not node.pruned])
            turn = 0
            if step.sample is None:
                turn = max((self._turns[node.id] for node in nodes), default=0)
                self._turns.update({node.id: turn + 1 for node in nodes})
            step = replace(step, nodes=tuple(nodes), states=tuple(map(self.tree.state, nodes)), turn=turn)
        self._steps[len(self.tree)] += 1
        if self._steps[len(self.tree)] > _IDLE:
            self.stop(f"no progress in {_IDLE} steps")
        return step

    def tell(self, results: Sequence[Any], *, executed: bool = False, step: Step | None = None) -> list[Node]:
        """Report the results of a step. Return the new children, or the evaluated nodes.

        Args:
            results: One entry per node of the step, in order. Expand: a list of thoughts (texts, Thoughts, Replies or
                Proposals). Evaluate: a value (a number, None or an Evaluation).
            executed: Whether the caller has executed the thoughts. Otherwise this method executes them.
            step: One of the `pending` steps. The default is the step that `ask` returns.

        Raises:
            TaskError: There is no current step, results are missing, or a method of the task fails.
        """
        step = next((one for one in self._branches.pending if step in (None, one)), None)
        if step is None:
            raise TaskError("tell() got results, but there is no current step: call ask() before tell()")
        if len(results) != len(step.nodes):
            raise TaskError(f"got {len(results)} results for {len(step.nodes)} nodes: pass one per node, in order")
        if isinstance(step, Expand):
            proposals = [as_proposals(siblings, self.checked) for siblings in results]
            if not executed:
                run_to_end(self.execute(step.nodes, step.states, proposals))
            places = zip(step.nodes, proposals, strict=True)
            children = [self.add(node, proposal, step.whole) for node, siblings in places for proposal in siblings]
            nodes = self.emit("on_expand", [child for child in children if child is not None and not child.pruned])
        else:
            for node, evaluation in zip(step.nodes, list(map(as_evaluation, results)), strict=True):
                value, failures = evaluation.value, evaluation.parse_failures
                if value is not None and math.isnan(value):
                    value, failures = float(self.task.scale[0]), failures + 1
                setattr(node, "fast" if step.fast else "value", value)
                node.parse_failures += failures
                self.tree.spend(node, evaluation.usage, evaluation.calls)
            nodes = self.emit("on_evaluate", list(step.nodes))
        self._branches.receive(step, nodes)
        if self._branches.stopped:  # a hook stopped the search before the algorithm saw these nodes
            self.best = max([self.best, *self.goals, *nodes], key=self._rank)
        return nodes

    def stop(self, why: str | None = None) -> None:
        """End the search and all of its branches; `search.best` stays as it is."""
        self.stopped, self._branches.stopped = why, True

    def inject(self, parent: Node, thought: str | Thought) -> Node | None:
        """Add the caller's thought as a child of `parent`. Return None if it is not legal or already exists."""
        proposal = as_proposal(thought, self.checked)
        run_to_end(self.execute([parent], [self.tree.state(parent)], [[proposal]]))
        return self.add(parent, proposal)

    def expand(
        self,
        nodes: Sequence[Node],
        count: int | None,
        whole: bool = False,
        sample: int | None = None,
        purpose: Purpose = "generate",
    ) -> Expand:
        """Return the step that expands each of `nodes`."""
        return Expand(tuple(nodes), tuple(map(self.tree.state, nodes)), count, whole, sample, purpose)

    def evaluate(self, nodes: Sequence[Node], fast: bool = False) -> Evaluate:
        """Return the step that evaluates each of `nodes`."""
        return Evaluate(tuple(nodes), tuple(map(self.tree.state, nodes)), fast)

    def fork(self, *branches: Steps) -> Fork:
        """Return the step that runs other generators of steps concurrently, until all of them have ended."""
        return Fork(branches)

    def complete(self) -> list[Node]:
        """Return the nodes to answer from, by position: leaves that can't be expanded, or else the deepest leaves."""
        leaves = sorted(self.tree.leaves(), key=lambda node: [step.index for step in self.tree.path(node)])
        ends = [node for node in leaves if self.is_end(node)]
        deepest = max((node.depth for node in leaves), default=0)
        return ends or [node for node in leaves if node.depth == deepest] or [self.best]

    def emit(self, event: str, nodes: list[Node]) -> list[Node]:
        """Call the hook of an event. Return the nodes to continue with."""
        return nodes if self._hooks is None else self._hooks.emit(event, self, nodes)

    def random(self, *about: object) -> random.Random:
        """Return a random generator seeded only by the run's seed, the question and `about`."""
        return random.Random(derive(self._seed, self.tree.question, *about))

    def _rank(self, node: Node) -> tuple[bool, bool, float]:
        """Sort key: verified answers, then goals, then the value."""
        return node is self.solved, node.goal, -math.inf if node.value is None else node.value


@cache
def _warn_of_depth() -> None:
    """Warn once per process."""
    log.warning("depth 1 has no level of thoughts: the model is asked for the answer at once; use a depth of 2 or more")
