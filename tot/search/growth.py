"""SearchTree: the tree of a search. It executes and applies thoughts, merges equal states and finds goals."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from typing import Any

from tot.llm.replies import Proposal
from tot.task.checked import CheckedTask
from tot.task.task import Task
from tot.task.world import HasAct, HasTerminal
from tot.tree.thought import Observation, State, Thought
from tot.tree.tree import Node, ThoughtTree


class SearchTree:
    """A tree that grows by proposals."""

    def __init__(
        self, task: Task, root: State, *, levels: float, merge: bool, wanders: bool, accepts: Callable[[Node], bool]
    ) -> None:
        """Start with a root.

        `levels` is T - 1. With `wanders`, a path may return to a state. `accepts` checks new goals.
        """
        self.task = task
        self.checked = CheckedTask(task)
        self.tree = ThoughtTree(root)
        self.levels = levels
        self.goals: list[Node] = []
        """Terminal states that the task accepts as solutions, in the order in which they were found."""
        self.solved: Node | None = None
        """The first state whose answer the task verified."""
        self.refused: str | None = None
        """Why the last text was rejected, if its generator gives a reason."""
        self._merge = merge
        self._wanders = wanders
        self._accepts = accepts
        self._has_terminal = isinstance(task, HasTerminal)
        self._observations: dict[tuple[int, str], Observation | None] = {}
        """By node and thought after it."""
        self._locks: defaultdict[tuple[int, str], asyncio.Lock] = defaultdict(asyncio.Lock)
        self._keys: dict[int, Hashable] = {0: self.checked.key(root)}
        self._siblings: dict[tuple[int, Hashable], Node] = {}
        self._first_nodes: dict[Hashable, Node] = {self._keys[0]: self.tree.root}

    async def execute(
        self, nodes: Sequence[Node], states: Sequence[State], proposed: Sequence[Sequence[Proposal]]
    ) -> None:
        """Execute the thoughts proposed after each node, concurrently, and add their observations.

        Equal thoughts after a node are executed once.
        """
        if isinstance(self.task, HasAct):
            places = zip(nodes, states, proposed, strict=True)
            await asyncio.gather(*(self._execute(node, state, one) for node, state, some in places for one in some))

    async def _execute(self, node: Node, state: State, proposal: Proposal) -> None:
        thought = proposal.thought
        if thought is None or thought.observation is not None or thought.tool_calls:
            return
        key = node.id, thought.canonical
        async with self._locks[key]:
            if key not in self._observations:
                self._observations[key] = await self.checked.act(state, thought)
        if (observation := self._observations[key]) is not None:
            proposal.thought = thought.model_copy(update={"observation": observation})

    def is_end(self, node: Node) -> bool:
        """Return whether the node can't be expanded: it is terminal or at full depth."""
        return node.terminal or node.depth >= self.levels

    def answer_at(self, node: Node) -> Any | None:
        """Return the answer that a node's state contains, or None if the model must be asked for it."""
        return self.checked.answer_at(self.tree.state(node))

    def verify(self, answer: Any) -> bool:
        """Return whether the task verifies the answer."""
        return self.checked.verify(self.tree.question, answer)

    def add(self, parent: Node, proposal: Proposal, whole: bool = False) -> Node | None:
        """Add a proposal, which may be a whole solution. Return the new node, or None.

        A proposal that reaches a known state is merged into its node; at a lower cost it replaces the node, which is
        pruned.
        """
        parent.parse_failures += proposal.parse_failures
        self.refused = proposal.refused or self.refused
        if (thought := proposal.thought) is not None:  # an earlier run may have executed it
            self._observations.setdefault((parent.id, thought.canonical), thought.observation)
        before = self.tree.state(parent)
        state = key = None
        if thought is not None:
            state = before.then(thought) if whole or thought.tool_calls else self.checked.step(before, thought)
            key = thought.canonical if whole or state is None else self.checked.key(state)
        returns = not self._wanders and any(self._keys[step.id] == key for step in self.tree.path(parent))
        if state is None or returns:
            parent.rejected += thought is not None  # not legal, or back at a state on the path
            self.tree.spend(parent, proposal.usage, proposal.calls)
            return None
        thought = state.thoughts[-1]  # the task may have changed it
        cost = parent.cost + (0.0 if whole else self.checked.cost(before, thought))
        known = self._siblings.get((parent.id, key)) or (self._first_nodes.get(key) if self._merge else None)
        if known is not None and not whole:  # equal solutions count as two votes
            if cost >= known.cost:
                self._merge_into(known, parent, thought, proposal)
                return None
            self.tree.prune(known)
        node = self.tree.add(parent, thought, state.world, cost=cost, prior=proposal.prior)
        node.confidence, node.decoder = proposal.confidence, proposal.decoder
        self.tree.spend(node, proposal.usage, proposal.calls)
        self._keys[node.id] = key
        self._siblings[parent.id, key] = node
        self._first_nodes[key] = node
        verified = thought.observation is not None and thought.observation.verified
        node.terminal = whole or thought.ended or verified or self.checked.is_terminal(state)
        self.check_end(node, state, whole)
        return node

    def _merge_into(self, node: Node, parent: Node, thought: Thought, proposal: Proposal) -> None:
        """Merge a proposal into the node of an equal state."""
        node.merged += 1
        self.tree.spend(node, proposal.usage, proposal.calls)
        if node.parent == parent.id and node.prior is not None and proposal.prior is not None:
            node.prior += proposal.prior
        self.tree.link(parent, node, thought)

    def check_end(self, node: Node, state: State, whole: bool = False) -> None:
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
        if node.goal and self._accepts(node):
            self.goals.append(node)
            node.verified = verified
            if verified and self.solved is None:
                self.solved = node
        else:
            node.goal = False
