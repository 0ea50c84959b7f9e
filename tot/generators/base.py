"""Generator: the base class of thought generators, with their common options."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Annotated, Any, ClassVar

from pydantic import BaseModel, ConfigDict, Field

from tot.decoders.errors import OptionError
from tot.llm.context import Context
from tot.task.task import Task
from tot.tree.tree import Node

Count = Annotated[int, Field(ge=1)]
Temperature = Annotated[float, Field(ge=0)]


class Generator(BaseModel):
    """A thought generator and its options. Any object with a method `propose` can be used instead."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    writes_answer: ClassVar[bool] = False
    """Whether the last thought contains the answer, so that no template has to ask for it."""
    has_confidence: ClassVar[bool] = True
    """Whether its thoughts can have a confidence."""
    temperature: Temperature = 0.7
    """SEED uses 0.2 and 1.0, ToT 0.7; small models ramble at 1.0."""

    def check(self, task: Task) -> None:
        """Raise OptionError or TaskError if the task lacks a method or a template that it needs."""

    def message_template(self, task: Task) -> str:
        """Return the only template of a thought. Raises OptionError or TaskError if it is not the only one."""
        first, *others = task.thought
        if others:
            chat = "prompts='chat', or " if len(task.chat.get("thought", task.thought)) == 1 else ""
            raise OptionError(
                f"{type(self).__name__} writes one message, but a thought of {type(task).__name__} has "
                f"{len(task.thought)} templates ({', '.join(task.thought)}): choose {chat}generator='sample'"
            )
        task.prompts.require(first)
        return first

    @abstractmethod
    async def propose(self, ctx: Context, nodes: Sequence[Node], count: int | None) -> Sequence[Sequence[Any]]:
        """Propose `count` next thoughts for each node; None uses the generator's default.

        A thought is a text, a Thought, a Reply or a Proposal.
        """
