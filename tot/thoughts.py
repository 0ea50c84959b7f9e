"""Thought generators: what may come next after a state."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Protocol

from pydantic import BaseModel, ConfigDict, Field

from tot.search.problem import Problem, is_cut
from tot.state import Thought
from tot.tree import Node


@dataclass(slots=True)
class Draft:
    """A thought on its way into the tree; None where its text was rejected or cut off."""

    thought: Thought | None
    new_tokens: int = 0
    seconds: float = 0.0
    parse_failures: int = 0


class ThoughtGenerator(Protocol):
    async def propose(self, problem: Problem, nodes: Sequence[Node], count: int) -> list[list[Draft]]:
        """`count` drafts for each node."""


class Sample(BaseModel):
    """Independent samples of one prompt (ToT, section 3, "Thought generator", a).

    A task whose thought has several templates (GSM8K: sub-question, then sub-answer) is asked them one after another,
    each level of all nodes' samples in one batch.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    temperature: Annotated[float, Field(ge=0)] = 0.7
    """SEED and ToT use 1.0 and 0.7; small models ramble at 1.0."""

    async def propose(self, problem: Problem, nodes: Sequence[Node], count: int) -> list[list[Draft]]:
        task, tree = problem.task, problem.tree
        drafts: list[list[Draft]] = [[Draft(Thought(parts={})) for _ in range(count)] for _ in nodes]
        for step, template in enumerate(task.thought):
            asked: list[list[Draft]] = []
            requests = []
            for node, siblings in zip(nodes, drafts, strict=True):
                # The first prompt is the same for all siblings, which share it; later ones quote what each one wrote.
                groups = [siblings] if step == 0 else [[draft] for draft in siblings]
                for call, group in enumerate(groups):
                    thought = group[0].thought
                    if thought is None:
                        continue
                    seed = problem.generation_seed(node, template, call)
                    sampling = problem.sampling(template, self.temperature, seed, n=len(group))
                    prompt = task.prompt(template, tree.state(node), **thought.parts)
                    requests.append(problem.request(prompt, sampling, "generate"))
                    asked.append(group)
            for group, completions in zip(asked, await problem.complete(requests), strict=True):
                for draft, completion in zip(group, completions, strict=True):
                    draft.new_tokens += completion.usage.new_tokens
                    draft.seconds += completion.usage.seconds
                    text = None if is_cut(completion) else task.parse_thought(template, completion.text)
                    if text is None:
                        draft.thought = None
                        draft.parse_failures += not is_cut(completion)
                    elif draft.thought is not None:
                        draft.thought = Thought(parts={**draft.thought.parts, template: text})
        return drafts
