"""Continue: the next piece of one message that the model writes in its own way.

The prompt asks for a whole answer, and the model's own words are cut into thoughts: what it drew is gone on with token
for token, so that a path of first children is the text that it would have written in one go.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

from pydantic import ConfigDict, field_serializer, field_validator

from tot.generators.base import Count, Generator
from tot.generators.tool_calls import PROMPT, Tool, observed, told
from tot.llm.context import Context
from tot.llm.replies import Proposal, Reply
from tot.tree.thought import Drawn, Thought, after_thinking
from tot.tree.tree import Node

_UNTIL = {
    "paragraph": ("\n\n",),
    "line": ("\n",),
    "sentence": tuple(f"{mark}{blank}" for mark in ".?!" for blank in " \n"),
}
_LABEL = re.compile(r"[\s#*_>-]*(?:[\w'’ ,()&/-]{0,80}:[\s*_]*|#[^\n]*|\*\*[^\n]*\*\*|\d{0,3}[.)]?)\s*")
"""What only announces a thought: `Step 2:`, `## Costs`, `**Costs**`, `2.`."""
_LABELS = 3
"""Labels after one another that are taken into the thought that they announce."""
_REPEATED = 3
"""Words of which a piece has to have as many to be a repetition: "so" may well be said twice."""


class Continue(Generator):
    """The next piece of one message, to where `until` says, the model's own end of turn, or its answer.

    The last template of the task's thought asks for the message, whose text so far is the assistant's. A label
    ("Step 2:") is no thought, but the beginning of one. Pieces that say what the message has said before, or nothing,
    are rejected, and counted as not readable.
    """

    thoughts: Count = 3
    """Pieces after each state, where the search does not say how many."""
    until: str = "paragraph"
    """paragraph, line or sentence; any other text is itself what ends a piece, and part of it."""
    tokens: Count | None = None
    """Most tokens of a piece."""

    def with_tools(self, functions: Sequence[Callable[..., Any]]) -> Generator:
        return UseTools(**dict(self), tools=functions)

    async def propose(self, ctx: Context, nodes: Sequence[Node], count: int | None) -> list[list[Proposal]]:
        count = count or self.thoughts

        async def extend(node: Node) -> list[Proposal]:
            replies = await self._ask(ctx, node, count)
            return await ctx.each(list(enumerate(replies)), lambda one: self.finish(ctx, node, *one, 1 / count))

        return await ctx.each(nodes, extend)

    @property
    def about(self) -> str:
        """What the model is told besides the task's prompt."""
        return ""

    @property
    def ends(self) -> tuple[str, ...]:
        """What a piece ends with."""
        return _UNTIL.get(self.until, (self.until,))

    def rest_of(self, text: str) -> tuple[str, ...] | None:
        """What the rest of a piece ends with that only begins with `text`; None where it is all of it."""
        return self.ends if _LABEL.fullmatch(text) else None

    async def _ask(
        self,
        ctx: Context,
        node: Node,
        count: int,
        until: tuple[str, ...] = (),
        call: int = 0,
        begun: Thought | None = None,
    ) -> list[Reply]:
        about: dict[str, Any] = {"max_tokens": self.tokens, "until": until or self.ends, "call": call, "begun": begun}
        about["about"] = self.about
        return await ctx.ask(ctx.task.thought[-1], node, count, temperature=self.temperature, **about)

    async def finish(self, ctx: Context, node: Node, sample: int, reply: Reply, prior: float) -> Proposal:
        """The thought that a piece is, or that it begins."""
        name = ctx.task.thought[-1]
        state = ctx.state(node)
        proposal = Proposal(Thought(parts={}), prior=prior, decoder=reply.decoder)
        for label in range(_LABELS + 1):
            before = proposal.thought
            assert before is not None
            proposal.usage += reply.usage
            proposal.calls += reply.calls
            thought = _longer(before, name, reply, first=not state.thoughts)
            text = thought.parts[name]
            message = state.message + text
            ended = reply.completion.finish_reason == "eos" or ctx.task.is_answered(after_thinking(message))
            full = not ended and ctx.room(name, (*state.thoughts, thought)) <= 0
            proposal.thought = thought.model_copy(update={"ended": ended or full, "truncated": full})
            rest = self.rest_of(reply.completion.text)
            if proposal.thought.ended or reply.cut or label == _LABELS or rest is None:
                break
            (reply,) = await self._ask(ctx, node, 1, rest, sample, proposal.thought)
        said = [words for each in state.thoughts if len(words := _words(each.parts.get(name, ""))) >= _REPEATED]
        if reply.cut:
            proposal.thought = None
        elif not _words(text) or _words(text) in said:
            proposal.thought, proposal.parse_failures = None, 1
        return proposal


def _longer(thought: Thought, name: str, reply: Reply, first: bool) -> Thought:
    """A thought with one more piece in its only part; blanks at the beginning of the message are left out."""
    drawn = thought.drawn.get(name, Drawn(text="", tokens=()))
    completion = reply.completion
    drawn = Drawn(
        text=drawn.text + completion.text,
        tokens=drawn.tokens + completion.tokens,
        logprobs=drawn.logprobs + completion.logprobs,
    )
    text = thought.parts.get(name, "") + completion.text
    text = text.lstrip() if first else text
    return Thought(parts={name: text}, drawn={name: drawn} if drawn.tokens or drawn.logprobs else {})


def _words(text: str) -> list[str]:
    """What a text says, whatever its blanks and case."""
    return text.casefold().split()


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

    def with_tools(self, functions: Sequence[Callable[..., Any]]) -> Generator:
        return self

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
