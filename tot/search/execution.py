"""Execution: execute the thoughts of a task whose thoughts are actions, and add their observations."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from tot.decoders.errors import TaskError
from tot.llm.replies import Proposal
from tot.task.checked import CheckedTask
from tot.task.world import HasAct
from tot.tree.thought import Observation, State, Thought
from tot.tree.tree import Node


class Execution:
    """Executes thoughts. Equal thoughts after a node are executed once."""

    def __init__(self, task: CheckedTask) -> None:
        self._task = task
        self._observations: dict[tuple[int, str], Observation | None] = {}
        self._locks: defaultdict[tuple[int, str], asyncio.Lock] = defaultdict(asyncio.Lock)

    async def execute(
        self, nodes: Sequence[Node], states: Sequence[State], proposed: Sequence[Sequence[Proposal]]
    ) -> None:
        """Execute the thoughts proposed after each node, concurrently, and add their observations."""
        if isinstance(self._task.task, HasAct):
            places = zip(nodes, states, proposed, strict=True)
            await asyncio.gather(*(self._execute(node, state, one) for node, state, some in places for one in some))

    async def _execute(self, node: Node, state: State, proposal: Proposal) -> None:
        thought = proposal.thought
        if thought is None or thought.observation is not None:
            return
        key = node.id, thought.text
        async with self._locks[key]:
            if key not in self._observations:
                self._observations[key] = await self._task.act(state, thought)
        if (observation := self._observations[key]) is not None:
            proposal.thought = thought.model_copy(update={"observation": observation})

    def remember(self, node: Node, proposals: Sequence[Proposal]) -> None:
        """Remember the observations of thoughts after a node, which an earlier run may have executed."""
        for proposal in proposals:
            if proposal.thought is not None:
                self._observations.setdefault((node.id, proposal.thought.text), proposal.thought.observation)


def each_of(proposals: Any) -> Iterable[Any]:
    """Return the thoughts after one node. Raises TaskError if the argument is not a list of thoughts."""
    if isinstance(proposals, str | Thought | Proposal | Mapping) or not isinstance(proposals, Iterable):
        raise TaskError(f"{proposals!r} is not a list of thoughts: pass a list for each node, which may be empty")
    return proposals
