"""Execute proposed thoughts, for tasks with actions that have observations."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from tot.llm.replies import Proposal
from tot.task.checked import CheckedTask
from tot.task.world import HasAct
from tot.tree.thought import State


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
