"""UseTools: the next piece of one message, in which the model may call tools (ReAct, Yao et al., 2023, section 2)."""

from __future__ import annotations

from typing import Any

from pydantic import ConfigDict, field_serializer, field_validator

from tot.context import Context
from tot.generators.continuation import Continue
from tot.steps import Proposal, Reply
from tot.tools import PROMPT, Tool, observed, told
from tot.tree import Node


class UseTools(Continue):
    """As Continue; a piece also ends with a call, and the result is put behind it: an observation, and part of the
    message that is gone on with, but nothing that the model wrote."""

    model_config = ConfigDict(arbitrary_types_allowed=True)

    tools: tuple[Tool, ...]

    @field_validator("tools", mode="before")
    @classmethod
    def _of_functions(cls, given: Any) -> tuple[Tool, ...]:
        return tuple(one if isinstance(one, Tool) else Tool(one) for one in given)

    @field_serializer("tools")
    def _names(self, tools: tuple[Tool, ...]) -> list[str]:
        return [tool.name for tool in tools]

    @property
    def about(self) -> str:
        return told(self.tools)

    @property
    def ends(self) -> tuple[str, ...]:
        return (PROMPT, *super().ends)

    def rest_of(self, text: str) -> tuple[str, ...] | None:
        return ("\n",) if text.endswith(PROMPT) else super().rest_of(text)

    async def finish(self, ctx: Context, node: Node, sample: int, reply: Reply, prior: float) -> Proposal:
        proposal = await super().finish(ctx, node, sample, reply, prior)
        thought = proposal.thought
        if thought is None:
            return proposal
        ((name, text),) = thought.parts.items()
        written = text.rstrip("\n")
        line = written.rpartition("\n")[2]
        if not line.startswith(PROMPT) or not line.removeprefix(PROMPT).strip():
            return proposal
        seen = await observed(line.removeprefix(PROMPT), self.tools)
        parts = {name: f"{written}\n{seen.text}\n"}
        # A model that ends its turn with a call waits for the result.
        full = ctx.room(name, (*ctx.state(node).thoughts, thought)) <= 0
        changes = {"parts": parts, "observation": seen, "ended": full, "truncated": full}
        proposal.thought = thought.model_copy(update=changes)
        return proposal
