"""Search: options of a search and its algorithm; SearchState: one search over one tree, driven by `ask` and `tell`.

A SearchState applies thoughts to the task's world, folds equal states together, finds goals and calls the hooks. It
calls no model: a SearchSession drives it with one, and a user's program can drive it by hand.
"""

from __future__ import annotations

import asyncio
import math
import random
from abc import abstractmethod
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BaseModel, ConfigDict, Field

from tot.decoders.errors import TaskError
from tot.evaluators.base import Evaluator
from tot.llm.replies import Evaluation, Proposal, as_evaluation, as_proposal
from tot.llm.seeds import derive
from tot.running import run_to_end
from tot.search.hooks import Hooks
from tot.search.steps import Evaluate, Expand, Step, Steps
from tot.task.checked import CheckedTask, user_code
from tot.task.task import Task
from tot.task.world import HasAct, HasTerminal
from tot.tree.thought import State, Thought
from tot.tree.tree import Node, ThoughtTree

Depth = Annotated[int, Field(ge=1)] | None
Count = Annotated[int, Field(ge=1)]


class Search(BaseModel):
    """Options of a search algorithm; `steps` is the algorithm, `start` sets it going."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    few_shot: ClassVar[bool] = False
    """Whether it is made for the papers' few-shot prompts."""
    whole: ClassVar[bool] = False
    """Whether it has whole solutions written in one go."""
    greedy_draft: ClassVar[bool] = False
    """Whether a whole solution that is asked for alone is decoded greedily, whatever the temperature."""
    wanders: ClassVar[bool] = False
    """Whether a path may lead back to a state that it has been in."""
    depth: Depth = None
    """T: T - 1 levels of thoughts, then the answer; None takes the task's own."""
    aggregate: Literal["best", "vote", "majority"] = "best"
    """The answer of the best state; or answers of all complete states, voting with their values, or one vote each."""

    def start(self, task: Task, question: str | State, *, seed: int = 0, hooks: object | None = None) -> SearchState:
        """This search at the root of a new tree, to be driven by `ask` and `tell`."""
        return SearchState(self, task, question, seed=seed, hooks=hooks)

    @abstractmethod
    def steps(self, search: SearchState) -> Steps:
        """Yield what is to be done next; keep `search.best` at the best so far: a search may be stopped any time."""

    def recipe(self, task: Task, generator: Any) -> dict[str, Any]:
        """What the search brings for a task and its generator, by kind: another one, an evaluator, itself anew."""
        return {}

    def resolved(self, find: Callable[[Any], Any]) -> Self:
        """The same search with objects for the evaluators that its options name; `find` returns and checks them."""
        return self

    @property
    def fast_evaluator(self) -> Evaluator | None:
        """What judges new nodes cheaply, where that is another than the state evaluator."""
        return None

    def depth_for(self, task: Task) -> int | None:
        """T for a task; None is no limit."""
        return self.depth or task.depth

    def merges(self, root: State) -> bool:
        """True where a state that was met before, anywhere in the tree, is not grown again."""
        return False


class MergingSearch(Search):
    """A search that can grow a graph of thoughts."""

    merge: bool | None = None
    """Fold equal states together (a graph of thoughts); None: where the task has a world."""

    def merges(self, root: State) -> bool:
        return root.world is not None if self.merge is None else self.merge


def by_value(nodes: Sequence[Node]) -> list[Node]:
    """Most valuable first; equals keep the order in which they came; nodes without a value come last."""
    return sorted(nodes, key=lambda node: float("inf") if node.value is None else -node.value)


class SearchState:
    """A search under way: `BFS(thoughts=2).start(task, "question")` makes one.

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
        """Where the search would answer from, as things stand."""
        self.goals: list[Node] = []
        """Terminal states that the task takes for solutions, in the order in which they were found."""
        self.solved: Node | None = None
        """The first state whose answer the task verified."""
        self.stopped: str | None = None
        """Why the search ended, where that needs saying."""
        depth = options.depth_for(task)
        self.levels = math.inf if depth is None else depth - 1
        """T - 1: levels of thoughts that may grow."""
        self._seed = seed
        self._hooks = Hooks(hooks)
        self._merge = options.merges(root)
        self._names_ends = isinstance(task, HasTerminal)
        self._keys: dict[int, Hashable] = {0: self.checked.key(root)}
        self._siblings: dict[tuple[int, Hashable], Node] = {}
        self._met: dict[Hashable, Node] = {self._keys[0]: self.tree.root}
        self._waiting: Step | None = None
        self._told: list[Node] | None = None
        self._over = False
        self._steps = options.steps(self)
        self._look(self.tree.root, root)

    def ask(self) -> Step | None:
        """The step to be done next, the same one until it is told; None where the search has ended."""
        while self._waiting is None and not self._over:
            step = self._next()
            if not isinstance(self.best, Node):
                raise TaskError(f"{type(self.options).__name__} set search.best to {self.best!r:.60}: set it to a node")
            if step is None:
                self._over = True
                if self.stopped is None and self._names_ends and not self.goals:
                    self.stopped = f"no goal among {len(self.tree) - 1} thoughts"
                break
            self._told = []
            if isinstance(step, Expand):
                step = self.expand(self._hooks.emit("on_select", self, list(step.nodes)), step.count, step.whole)
            if self._over:
                break
            if step.nodes:
                self._waiting = step
        return None if self._over else self._waiting

    def _next(self) -> Step | None:
        """The step that the algorithm yields next; None at its end."""
        name = type(self.options).__name__
        with user_code(f"{name}.steps"):
            try:
                step = next(self._steps) if self._told is None else self._steps.send(self._told)
            except StopIteration:
                return None
        if not isinstance(step, Expand | Evaluate) or not all(isinstance(node, Node) for node in step.nodes):
            raise TaskError(
                f"{name}.steps yielded {step!r:.100}: yield search.expand(nodes, ...) or search.evaluate(nodes)"
            )
        return step

    def tell(self, results: Sequence[Any], *, acted: bool = False) -> list[Node]:
        """Give the results of the step asked for. Returns the new children, or the nodes valued.

        For each node of an Expand some thoughts (texts, Thoughts, Replies or Proposals), for each of an Evaluate a
        value (a number, None or an Evaluation). A task that acts on thoughts does so here, unless the caller has had
        that done (`acted`).

        Raises TaskError where nothing was asked, where results are missing, and where a method of the task fails.
        """
        step = self._waiting
        if step is None:
            raise TaskError("nothing was asked: call ask() before tell()")
        if len(results) != len(step.nodes):
            raise TaskError(f"{len(results)} results for {len(step.nodes)} nodes: tell one for each, in their order")
        if isinstance(step, Expand):
            given = [[as_proposal(one, self.task) for one in each_of(proposals)] for proposals in results]
            proposals = given if acted else run_to_end(self.acted(step.states, given))
            self._waiting = None
            grown: dict[int, Node] = {}
            for node, siblings in zip(step.nodes, proposals, strict=True):
                for proposal in siblings:
                    child = self._grow(node, proposal, step.whole)
                    if child is not None:
                        grown[child.id] = child
            nodes = self._hooks.emit("on_expand", self, list(grown.values()))
        else:
            evaluations = list(map(as_evaluation, results))
            self._waiting = None
            for node, evaluation in zip(step.nodes, evaluations, strict=True):
                self._value(node, evaluation, step.fast)
            nodes = self._hooks.emit("on_evaluate", self, list(step.nodes))
        self._told = nodes
        if self._over:  # a hook stopped the search before it could look at these
            self.best = max([self.best, *self.goals, *nodes], key=self._rank)
        return nodes

    async def acted(self, states: Sequence[State], found: list[list[Proposal]]) -> list[list[Proposal]]:
        """The proposals after each state, each thought with its observation; equal ones are acted on once."""
        if not isinstance(self.task, HasAct):
            return found
        thoughts = {
            (i, one.thought.text): (state, one.thought)
            for i, (state, proposals) in enumerate(zip(states, found, strict=True))
            for one in proposals
            if one.thought is not None and one.thought.observation is None
        }
        results = await asyncio.gather(*(self.checked.act(*each) for each in thoughts.values()))
        observations = dict(zip(thoughts, results, strict=True))
        for i, proposals in enumerate(found):
            for one in proposals:
                seen = None if one.thought is None else observations.get((i, one.thought.text))
                if one.thought is not None and seen is not None:
                    one.thought = one.thought.model_copy(update={"observation": seen})
        return found

    def stop(self, why: str) -> None:
        """End the search as it stands."""
        self.stopped, self._over = why, True

    def inject(self, parent: Node, thought: str | Thought) -> Node | None:
        """A thought of the caller's own as a child of `parent`; None where it is not legal, or there already."""
        ((proposal,),) = run_to_end(self.acted([self.tree.state(parent)], [[as_proposal(thought, self.task)]]))
        return self._grow(parent, proposal, whole=False)

    def expand(self, nodes: Sequence[Node], count: int | None, whole: bool = False) -> Expand:
        """The step that grows thoughts after each of `nodes`."""
        return Expand(tuple(nodes), tuple(map(self.tree.state, nodes)), count, whole)

    def evaluate(self, nodes: Sequence[Node], fast: bool = False) -> Evaluate:
        """The step that values each of `nodes`."""
        return Evaluate(tuple(nodes), tuple(map(self.tree.state, nodes)), fast)

    def is_end(self, node: Node) -> bool:
        """True where nothing more may grow: a terminal state, or full depth."""
        return node.terminal or node.depth >= self.levels

    def heuristic(self, node: Node) -> float:
        """The task's estimate of the cost still to come."""
        return self.checked.heuristic(self.tree.state(node))

    def reward(self, node: Node) -> float:
        """The task's own reward at a node."""
        return self.checked.reward(self.tree.state(node))

    def answer_at(self, node: Node) -> Any | None:
        """The answer that a node's state holds without asking; None where it holds none."""
        return self.checked.answer_at(self.tree.state(node))

    def verify(self, answer: Any) -> bool:
        """True where the task itself can tell that an answer is right."""
        return self.checked.verify(self.tree.state(self.tree.root).question, answer)

    def complete(self) -> list[Node]:
        """The states that an answer may be asked at: leaves where nothing more may grow; else the deepest leaves."""
        leaves = self.tree.leaves()
        ends = [node for node in leaves if self.is_end(node)]
        deepest = max((node.depth for node in leaves), default=0)
        return ends or [node for node in leaves if node.depth == deepest] or [self.best]

    def emit(self, event: str, nodes: list[Node]) -> list[Node]:
        """Tell the hook of an event that only the search knows of; the nodes to go on with."""
        return self._hooks.emit(event, self, nodes)

    def random(self, *about: object) -> random.Random:
        """Random numbers that depend on the run's seed, the question and `about` alone."""
        return random.Random(derive(self._seed, self.tree.state(self.tree.root).question, *about))

    def _grow(self, parent: Node, proposal: Proposal, whole: bool) -> Node | None:
        """The node that a proposal becomes, or that it makes cheaper to reach; None where it adds nothing."""
        parent.parse_failures += proposal.parse_failures
        thought = proposal.thought
        before = self.tree.state(parent)
        state = None
        if thought is not None:
            state = before.then(thought) if whole else self.checked.step(before, thought)
        key = None if thought is None or state is None else thought.text if whole else self.checked.key(state)
        back = not self.options.wanders and any(self._keys[step.id] == key for step in self.tree.path(parent))
        if state is None or back:
            parent.rejected += thought is not None  # not legal, or back to where the path has been
            self.tree.spend(parent, proposal.usage, proposal.calls)
            return None
        thought = state.thoughts[-1]  # as the task wrote it down
        cost = parent.cost + (0.0 if whole else self.checked.cost(before, thought))
        known = self._siblings.get((parent.id, key)) or (self._met.get(key) if self._merge else None)
        known = None if whole else known  # solutions that say the same are two votes
        if known is not None:
            return self._reached_again(known, parent, thought, state, cost, proposal)
        node = self.tree.add(parent, thought, state.world, cost=cost, prior=proposal.prior)
        node.confidence, node.decoder = proposal.confidence, proposal.decoder
        self.tree.spend(node, proposal.usage, proposal.calls)
        self._keys[node.id] = key
        self._siblings[parent.id, key] = node
        self._met.setdefault(key, node)
        seen = thought.observation is not None and thought.observation.verified
        node.terminal = whole or thought.ended or seen or self.checked.is_terminal(state)
        self._look(node, state, whole)
        return node

    def _reached_again(
        self, node: Node, parent: Node, thought: Thought, state: State, cost: float, proposal: Proposal
    ) -> Node | None:
        """Fold a proposal into the node whose state it leads to; the node where this is a cheaper way."""
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
        for below in self.tree.below(node):  # worlds may remember the path, which has changed
            if below is not node and below.parent is not None and below.thought is not None:
                after = self.checked.step(self.tree.state(self.tree[below.parent]), below.thought)
                below.world = below.world if after is None else after.world
        return node

    def _rank(self, node: Node) -> tuple[bool, bool, float]:
        """Verified answers first, then goals, then the most valuable."""
        return node is self.solved, node.goal, -math.inf if node.value is None else node.value

    def _look(self, node: Node, state: State, whole: bool = False) -> None:
        """Note a new node's terminal state, goal and verified answer; one written in one go has to be verified."""
        if node.parent is None:
            node.terminal = self.checked.is_terminal(state)
        if not (node.terminal if self._names_ends else self.is_end(node)):
            return
        answer = self.answer_at(node)
        seen = None if node.thought is None else node.thought.observation
        verified = answer is not None and ((seen is not None and seen.verified) or self.verify(answer))
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


def each_of(proposals: Any) -> Iterable[Any]:
    """The thoughts after one node. Raises TaskError for what is no list of thoughts."""
    if isinstance(proposals, str | Thought | Proposal | Mapping) or not isinstance(proposals, Iterable):
        raise TaskError(f"{proposals!r} is not a list of thoughts: tell a list for each node, which may be empty")
    return proposals
