"""Check the results of an expansion, and execute its thoughts if the task has actions with observations."""

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


class Execution:
    """Executes thoughts and adds their observations. Equal thoughts after a node are executed once."""

    def __init__(self, task: CheckedTask) -> None:
        self._task = task
        self._observations: dict[tuple[int, str], Observation | None] = {}
        self._locks: defaultdict[tuple[int, str], asyncio.Lock] = defaultdict(asyncio.Lock)

    async def execute(self, node: int, state: State, proposal: Proposal) -> Proposal:
        """Execute a thought after a node, whose state is given."""
        thought = proposal.thought
        if thought is None or thought.observation is not None or not isinstance(self._task.task, HasAct):
            return proposal
        key = node, thought.text
        async with self._locks[key]:
            if key not in self._observations:
                self._observations[key] = await self._task.act(state, thought)
        if (observation := self._observations[key]) is not None:
            proposal.thought = thought.model_copy(update={"observation": observation})
        return proposal

    def replay(self, node: int, proposals: Sequence[Proposal]) -> None:
        """Use the observations of an earlier run."""
        thoughts = [proposal.thought for proposal in proposals if proposal.thought is not None]
        self._observations |= {(node, thought.text): thought.observation for thought in thoughts}


async def execute(task: CheckedTask, states: Sequence[State], found: list[list[Proposal]]) -> list[list[Proposal]]:
    """Execute each state's proposed thoughts and add their observations. Equal thoughts are executed once."""
    execute_one = Execution(task).execute
    proposed = enumerate(zip(states, found, strict=True))
    await asyncio.gather(*(execute_one(i, state, one) for i, (state, some) in proposed for one in some))
    return found


def each_of(proposals: Any) -> Iterable[Any]:
    """Return the thoughts after one node. Raises TaskError if the argument is not a list of thoughts."""
    if isinstance(proposals, str | Thought | Proposal | Mapping) or not isinstance(proposals, Iterable):
        raise TaskError(f"{proposals!r} is not a list of thoughts: pass a list for each node, which may be empty")
    return proposals
