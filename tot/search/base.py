"""Search: a search algorithm and its options; SearchState: one search over one tree, driven by `ask` and `tell`.

A SearchState applies thoughts to the task's world, merges equal states, finds goals and calls the hooks. It calls no
model: a SearchSession drives it with a model, and a user's program can drive it by hand.
"""

from __future__ import annotations

import logging
import math
import random
from abc import abstractmethod
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from functools import cache
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BaseModel, ConfigDict, Field

from tot.decoders.errors import TaskError
from tot.evaluators.base import Evaluator
from tot.llm.replies import Evaluation, Proposal, as_evaluation, as_proposal
from tot.llm.seeds import derive
from tot.running import run_to_end
from tot.search.branches import Branch
from tot.search.execution import each_of, execute
from tot.search.hooks import Hooks
from tot.search.steps import Evaluate, Expand, Requested, Step, Steps
from tot.task.checked import CheckedTask, user_code
from tot.task.task import Task
from tot.task.world import HasActions, HasTerminal
from tot.tree.thought import State, Thought
from tot.tree.tree import Node, ThoughtTree

log = logging.getLogger(__name__)

_IDLE = 10_000
"""Maximum number of steps in a row without progress."""
Count = Annotated[int, Field(ge=1)]
Depth = Count | None


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
    depth: Depth = None
    """T: T - 1 levels of thoughts, then the answer. None uses the task's depth."""
    aggregate: Literal["best", "vote", "majority"] = "best"
    """How to pick the answer: from the best state, or by a vote of all complete states.

    Votes are weighted by the states' values ("vote") or count once per state ("majority").
    """

    def start(self, task: Task, question: str | State, *, seed: int = 0, hooks: object | None = None) -> SearchState:
        """Start this search at the root of a new tree; drive it with `ask` and `tell`."""
        return SearchState(self, task, question, seed=seed, hooks=hooks)

    @abstractmethod
    def steps(self, search: SearchState) -> Steps:
        """Yield the next step. Keep `search.best` up to date: a search may be stopped at any time."""

    def recipe(self, task: Task, generator: Any) -> dict[str, Any]:
        """Return the parts that this search replaces for a task and its generator.

        The keys are "search", "generator" and "evaluator".
        """
        return {}

    def resolved(self, find: Callable[[Any], Any]) -> Self:
        """Return this search with its evaluators resolved: `find` turns a name into an object, and checks it."""
        return self

    def evaluates(self, task: Task) -> bool:
        """Return whether the search needs values of states."""
        return self.expands

    def prunes(self, task: Task) -> bool:
        """Return whether the values of unfinished states decide which of them are expanded."""
        return self.evaluates(task)

    @property
    def asks_second_model(self) -> bool:
        """Whether the search can ask a second model (`escalate`)."""
        return False

    def check(self, task: Task) -> None:
        """Raise OptionError or TaskError if the task lacks a method or a template that it needs."""
        if not self.whole:
            return
        if solutions := getattr(self, "solutions", ()):
            task.require(*solutions)
        elif isinstance(task, HasActions):
            task.require(task.chain)
        elif not task.has_template(task.chain):  # a solution is one thought, and then the answer
            task.require(*task.thought)

    @property
    def fast_evaluator(self) -> Evaluator | None:
        """The cheap evaluator of new nodes, if it differs from the state evaluator."""
        return None

    def depth_for(self, task: Task) -> int | None:
        """Return T for a task; None means no limit."""
        return self.depth or task.depth

    def merges(self, root: State) -> bool:
        """Return whether equal states are merged, wherever they are in the tree."""
        return False


class MergingSearch(Search):
    """A search that can grow a graph of thoughts."""

    merge: bool | None = None
    """Merge equal states (a graph of thoughts). None merges them if the task has a world."""

    def merges(self, root: State) -> bool:
        return root.world is not None if self.merge is None else self.merge


def by_value(nodes: Sequence[Node]) -> list[Node]:
    """Sort nodes by value, highest first. The sort is stable; nodes without a value come last."""
    return sorted(nodes, key=lambda node: float("inf") if node.value is None else -node.value)


class SearchState:
    """A running search, created by `BFS(thoughts=2).start(task, "question")`.

    while (step := search.ask()) is not None:
        if isinstance(step, Expand):
            search.tell([my_thoughts(state) for state in step.states])  # some texts for each state
        else:
            search.tell([my_value(state) for state in step.states])  # a number for each state
    search.best, search.tree
    """

    def __init__(
        self, options: Search, task: Task, question: str | State, *, seed: int = 0, hooks: object | None = None
    ) -> None:
        self.options = options
        self.task = task
        self.checked = CheckedTask(task)
        root = question if isinstance(question, State) else self.checked.start(question)
        self.tree = ThoughtTree(root)
        self.best: Node = self.tree.root
        """The node that the search would currently answer from."""
        self.goals: list[Node] = []
        """Terminal states that the task accepts as solutions, in the order in which they were found."""
        self.solved: Node | None = None
        """The first state whose answer the task verified."""
        self.stopped: str | None = None
        """Why the search ended early or without a goal, if it did."""
        self.requested = Requested()
        self.escalates = self.budgeted = False
        """Whether a larger model can be asked (purpose "escalate"); whether there is a budget. Set by the session."""
        self.cheap_samples = 8
        """Number of samples that take little more time together than one. Set by the session."""
        self.distinct: int | None = None
        """Number of different whole solutions, if they are decoded greedily. Set by the session."""
        self.one_by_one = False
        """Whether single thoughts can arrive one by one (`Expand.partial`). Set by the session."""
        depth = options.depth_for(task)
        self.levels = math.inf if depth is None else depth - 1
        """T - 1: the maximum number of levels of thoughts."""
        if self.levels < 1 and not options.whole:
            _warn_of_depth()
        self._seed = seed
        self._hooks = Hooks(hooks)
        self._merge = options.merges(root)
        self._has_terminal = isinstance(task, HasTerminal)
        self._keys: dict[int, Hashable] = {0: self.checked.key(root)}
        self._siblings: dict[tuple[int, Hashable], Node] = {}
        self._first_nodes: dict[Hashable, Node] = {self._keys[0]: self.tree.root}
        self._finished = False
        self._reached: set[tuple[str | bool, int]] = set()
        """The nodes that steps have expanded or evaluated, and the sizes of the tree at steps."""
        self._idle = 0
        """Number of steps since the last one that reached something new."""
        self._branches = [Branch(options.steps(self))]
        """The branches that have not ended. The last one received results most recently."""
        self._check_end(self.tree.root, root)

    def ask(self) -> Step | None:
        """Return the next step, or None if the search has ended. Repeats the step until `tell` gets its results."""
        return next(iter(self.pending()), None)

    def pending(self) -> list[Step]:
        """Return the next step of every branch. They can run at the same time; `tell` takes them in any order."""
        for branch in self._branches:  # a branch may append others
            while branch.step is None and not self._finished and (step := self._next(branch)) is not None:
                branch.nodes = []
                if isinstance(step, Expand):
                    nodes = self._hooks.emit("on_select", self, [node for node in step.nodes if not node.pruned])
                    step = replace(step, nodes=tuple(nodes), states=tuple(map(self.tree.state, nodes)))
                    step = replace(step, turn=self.requested.add(step))
                self._check_progress(step)
                branch.step = step if step.nodes else None
        if self._finished:
            return []
        self._branches = [branch for branch in self._branches if branch.step is not None]
        self._finished = not self._branches
        if self._finished and self.stopped is None and self._has_terminal and not self.goals:
            self.stopped = f"no goal among {len(self.tree) - 1} thoughts"
        return [branch.step for branch in self._branches if branch.step is not None]

    def _check_progress(self, step: Step) -> None:
        """Stop the search after many steps in a row that expand and evaluate no new node."""
        kind = step.fast if isinstance(step, Evaluate) else "expand"
        reached = {(kind, node.id) for node in step.nodes} | {("node", len(self.tree))}
        self._idle = self._idle + 1 if reached <= self._reached else 0
        self._reached |= reached
        if self._idle >= _IDLE:
            self.stop(f"no progress in {_IDLE} steps")

    def branch(self, steps: Steps) -> None:
        """Start another generator of steps, which runs independently of the others."""
        self._branches.append(Branch(steps))

    def _next(self, branch: Branch) -> Step | None:
        """Return the step that the algorithm yields next in a branch, or None at the branch's end."""
        name = type(self.options).__name__
        with user_code(f"{name}.steps"):
            step = branch.next()
        if not isinstance(self.best, Node):
            raise TaskError(f"{name} set search.best to {self.best!r:.60}: set it to a node")
        if step is None:
            return None
        if not isinstance(step, Expand | Evaluate) or not all(isinstance(node, Node) for node in step.nodes):
            raise TaskError(
                f"{name}.steps yielded {step!r:.100}: yield search.expand(nodes, ...) or search.evaluate(nodes)"
            )
        return step

    def tell(self, results: Sequence[Any], *, acted: bool = False, step: Step | None = None) -> list[Node]:
        """Report the results of a step. Return the new children, or the evaluated nodes.

        Args:
            results: One entry per node of the step, in order. Expand: a list of thoughts (texts, Thoughts, Replies or
                Proposals). Evaluate: a value (a number, None or an Evaluation).
            acted: Whether the caller has executed the thoughts (`execute`). Otherwise this method executes them.
            step: One of the `pending` steps. The default is the step that `ask` returns.

        Raises:
            TaskError: There is no current step, results are missing, or a method of the task fails.
        """
        waiting = (one for one in self._branches if one.step is not None and (step is None or step is one.step))
        branch = next(waiting, None)
        if branch is None or (step := branch.step) is None:
            raise TaskError("tell() got results, but there is no current step: call ask() before tell()")
        if len(results) != len(step.nodes):
            raise TaskError(f"got {len(results)} results for {len(step.nodes)} nodes: pass one per node, in order")
        if isinstance(step, Expand):
            proposals = [[as_proposal(one, self.task) for one in each_of(siblings)] for siblings in results]
            if not acted:
                proposals = run_to_end(execute(self.checked, step.states, proposals))
            branch.step = None
            if step.partial:
                self.requested.receive(sum(map(len, proposals)))
            children: dict[int, Node] = {}
            for node, siblings in zip(step.nodes, proposals, strict=True):
                for proposal in siblings:
                    child = self._add_child(node, proposal, step.whole)
                    if child is not None:
                        children[child.id] = child
            nodes = self._hooks.emit("on_expand", self, list(children.values()))
        else:
            evaluations = list(map(as_evaluation, results))
            branch.step = None
            for node, evaluation in zip(step.nodes, evaluations, strict=True):
                self._value(node, evaluation, step.fast)
            nodes = self._hooks.emit("on_evaluate", self, list(step.nodes))
        branch.nodes = nodes
        self._branches.remove(branch)
        self._branches.append(branch)
        if self._finished:  # a hook stopped the search before the algorithm saw these nodes
            self.best = max([self.best, *self.goals, *nodes], key=self._rank)
        return nodes

    def stop(self, why: str | None = None) -> None:
        """End the search and all of its branches; `search.best` stays as it is."""
        self.stopped, self._finished = why, True

    def inject(self, parent: Node, thought: str | Thought) -> Node | None:
        """Add the caller's thought as a child of `parent`. Return None if it is not legal or already exists."""
        ((proposal,),) = run_to_end(
            execute(self.checked, [self.tree.state(parent)], [[as_proposal(thought, self.task)]])
        )
        return self._add_child(parent, proposal, whole=False)

    def expand(self, nodes: Sequence[Node], count: int | None, whole: bool = False, **options: Any) -> Expand:
        """Return the step that expands each of `nodes`. `options` are other fields of `Expand`."""
        return Expand(tuple(nodes), tuple(map(self.tree.state, nodes)), count, whole, **options)

    def evaluate(self, nodes: Sequence[Node], fast: bool = False) -> Evaluate:
        """Return the step that evaluates each of `nodes`."""
        return Evaluate(tuple(nodes), tuple(map(self.tree.state, nodes)), fast)

    def is_end(self, node: Node) -> bool:
        """Return whether the node can't be expanded: it is terminal or at full depth."""
        return node.terminal or node.depth >= self.levels

    def heuristic(self, node: Node) -> float:
        """Return the task's estimate of the remaining cost."""
        return self.checked.heuristic(self.tree.state(node))

    def reward(self, node: Node) -> float:
        """Return the task's reward at a node."""
        return self.checked.reward(self.tree.state(node))

    def answer_at(self, node: Node) -> Any | None:
        """Return the answer that a node's state contains, or None if the model must be asked for it."""
        return self.checked.answer_at(self.tree.state(node))

    def verify(self, answer: Any) -> bool:
        """Return whether the task verifies the answer."""
        return self.checked.verify(self.tree.state(self.tree.root).question, answer)

    def complete(self) -> list[Node]:
        """Return the nodes to answer from, by position: leaves that can't be expanded, or else the deepest leaves."""
        leaves = sorted(self.tree.leaves(), key=lambda node: [step.index for step in self.tree.path(node)])
        ends = [node for node in leaves if self.is_end(node)]
        deepest = max((node.depth for node in leaves), default=0)
        return ends or [node for node in leaves if node.depth == deepest] or [self.best]

    def emit(self, event: str, nodes: list[Node]) -> list[Node]:
        """Call the hook of an event that the algorithm triggers. Return the nodes to continue with."""
        return self._hooks.emit(event, self, nodes)

    def random(self, *about: object) -> random.Random:
        """Return a random generator seeded only by the run's seed, the question and `about`."""
        return random.Random(derive(self._seed, self.tree.state(self.tree.root).question, *about))

    def _add_child(self, parent: Node, proposal: Proposal, whole: bool) -> Node | None:
        """Add a proposal. Return the new node, or the known node that it reaches at a lower cost, or None."""
        parent.parse_failures += proposal.parse_failures
        thought = proposal.thought
        before = self.tree.state(parent)
        state = None
        if thought is not None:
            state = before.then(thought) if whole else self.checked.step(before, thought)
        key = None if thought is None or state is None else thought.text if whole else self.checked.key(state)
        returns = not self.options.wanders and any(self._keys[step.id] == key for step in self.tree.path(parent))
        if state is None or returns:
            parent.rejected += thought is not None  # not legal, or back at a state on the path
            self.tree.spend(parent, proposal.usage, proposal.calls)
            return None
        thought = state.thoughts[-1]  # the task may have changed it
        cost = parent.cost + (0.0 if whole else self.checked.cost(before, thought))
        duplicate = self._siblings.get((parent.id, key)) or (self._first_nodes.get(key) if self._merge else None)
        duplicate = None if whole else duplicate  # equal solutions count as two votes
        if duplicate is not None:
            return self._merge_into(duplicate, parent, thought, state, cost, proposal)
        node = self.tree.add(parent, thought, state.world, cost=cost, prior=proposal.prior)
        node.confidence, node.decoder = proposal.confidence, proposal.decoder
        self.tree.spend(node, proposal.usage, proposal.calls)
        self._keys[node.id] = key
        self._siblings[parent.id, key] = node
        self._first_nodes.setdefault(key, node)
        verified = thought.observation is not None and thought.observation.verified
        node.terminal = whole or thought.ended or verified or self.checked.is_terminal(state)
        self._check_end(node, state, whole)
        return node

    def _merge_into(
        self, node: Node, parent: Node, thought: Thought, state: State, cost: float, proposal: Proposal
    ) -> Node | None:
        """Merge a proposal into the node of an equal state. Return the node if the new path costs less."""
        sibling = node.parent == parent.id
        node.merged += 1
        self.tree.spend(node, proposal.usage, proposal.calls)
        if sibling and node.prior is not None and proposal.prior is not None:
            node.prior += proposal.prior
        if not cost < node.cost or node.pruned:
            self.tree.link(parent, node, thought)
            return None
        self.tree.move(node, parent, thought)
        self._siblings[parent.id, self._keys[node.id]] = node
        node.cost, node.world = cost, state.world
        if not sibling:
            node.prior = proposal.prior
        for descendant in self.tree.below(node):  # a world may depend on the path, which has changed
            if descendant is not node and descendant.parent is not None and descendant.thought is not None:
                after = self.checked.step(self.tree.state(self.tree[descendant.parent]), descendant.thought)
                descendant.world = descendant.world if after is None else after.world
        return node

    def _rank(self, node: Node) -> tuple[bool, bool, float]:
        """Sort key: verified answers, then goals, then the value."""
        return node is self.solved, node.goal, -math.inf if node.value is None else node.value

    def _check_end(self, node: Node, state: State, whole: bool = False) -> None:
        """Set `terminal`, `goal` and `verified` of a new node. A whole solution is a goal only if verified."""
        if node.parent is None:
            node.terminal = self.checked.is_terminal(state)
        if not (node.terminal if self._has_terminal else self.is_end(node)):
            return
        answer = self.answer_at(node)
        observation = None if node.thought is None else node.thought.observation
        observed = observation is not None and observation.verified
        verified = answer is not None and (observed or self.verify(answer))
        whole = whole or self.checked.is_whole(node.thought)
        node.goal = verified or (not whole and self.checked.is_goal(state))
        if node.goal and self._hooks.emit("on_goal", self, [node]):
            self.goals.append(node)
            node.verified = verified
            if verified and self.solved is None:
                self.solved = node
        else:
            node.goal = False

    def _value(self, node: Node, evaluation: Evaluation, fast: bool) -> None:
        value, failures = evaluation.value, evaluation.parse_failures
        if value is not None and math.isnan(value):
            value, failures = self.task.default_value, failures + 1
        if fast:
            node.fast = value
        else:
            node.value = value
        self.tree.spend(node, evaluation.usage, evaluation.calls)
        node.parse_failures += failures


@cache
def _warn_of_depth() -> None:
    """Warn once per process."""
    log.warning("depth 1 has no level of thoughts: the model is asked for the answer at once; use a depth of 2 or more")
