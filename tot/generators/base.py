"""Generator: base of the thought generators, with the options that all have."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from tot.decoders.errors import OptionError
from tot.llm.context import Context
from tot.tree.tree import Node

Count = Annotated[int, Field(ge=1)]
Temperature = Annotated[float, Field(ge=0)]


class Generator(BaseModel):
    """Options of a thought generator; `propose` is what it does. An object with that method will do as well."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    temperature: Temperature = 0.7
    """SEED and ToT use 1.0 and 0.7; small models ramble at 1.0."""

    @abstractmethod
    async def propose(self, ctx: Context, nodes: Sequence[Node], count: int | None) -> Sequence[Sequence[Any]]:
        """What may come after each node: `count` thoughts, or as many as the generator gives of itself.

        A thought is a text, a Thought, a Reply or a Proposal.
        """

    def with_tools(self, functions: Sequence[Callable[..., Any]]) -> Generator:
        """The same generator, with tools that the model may call. Raises OptionError for one that can't."""
        raise OptionError(
            f"tools are called in a message that is written piece by piece: leave {type(self).__name__} out, or choose "
            "continue"
        )
