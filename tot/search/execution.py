"""Check the results of an expansion, and execute its thoughts if the task has actions with observations."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from tot.decoders.errors import TaskError
from tot.llm.replies import Proposal
from tot.task.checked import CheckedTask
from tot.task.world import HasAct
from tot.tree.thought import State, Thought


async def execute(task: CheckedTask, states: Sequence[State], found: list[list[Proposal]]) -> list[list[Proposal]]:
    """Execute each state's proposed thoughts and add their observations. Equal thoughts are executed once."""
    if not isinstance(task.task, HasAct):
        return found
    thoughts = {
        (i, one.thought.text): (state, one.thought)
        for i, (state, proposals) in enumerate(zip(states, found, strict=True))
        for one in proposals
        if one.thought is not None and one.thought.observation is None
    }
    results = await asyncio.gather(*(task.act(*pair) for pair in thoughts.values()))
    observations = dict(zip(thoughts, results, strict=True))
    for i, proposals in enumerate(found):
        for one in proposals:
            observation = None if one.thought is None else observations.get((i, one.thought.text))
            if one.thought is not None and observation is not None:
                one.thought = one.thought.model_copy(update={"observation": observation})
    return found


def each_of(proposals: Any) -> Iterable[Any]:
    """Return the thoughts after one node. Raises TaskError if the argument is not a list of thoughts."""
    if isinstance(proposals, str | Thought | Proposal | Mapping) or not isinstance(proposals, Iterable):
        raise TaskError(f"{proposals!r} is not a list of thoughts: pass a list for each node, which may be empty")
    return proposals
