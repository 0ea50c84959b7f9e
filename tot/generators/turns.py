"""Turns: use whole turns of the assistant as thoughts: a text, and calls of functions."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import ConfigDict, field_serializer, field_validator
from pydantic_core import from_json

from tot.decoders.request import Message, ToolCall
from tot.decoders.tools import FORMS, OWN
from tot.generators.base import Count, Generator
from tot.generators.tool_calls import Tool
from tot.llm.context import Context, derive
from tot.llm.replies import Proposal, Reply
from tot.task.call_votes import canonical
from tot.task.task import Task
from tot.tree.thought import Thought
from tot.tree.tree import Node

_Running = dict[tuple[str, str], asyncio.Future[str]]
"""The calls after one node, by function and arguments. Equal ones are executed once."""


class Turns(Generator):
    """Decode turns of the assistant: with `tools`, in the form in which the model calls functions.

    The results of calls are observations, and messages of later prompts. A turn without calls ends its path, and so
    does a turn that calls a function which is not `readonly`: its calls are the answer. A turn is rejected if the
    arguments of a call do not match the schema or the type hints of its function.
    """

    model_config = ConfigDict(arbitrary_types_allowed=True)

    writes_answer = True
    has_confidence = False
    thoughts: Count = 3
    """Number of turns per state, unless the search sets it."""
    tools: tuple[Tool, ...] = ()
    """Functions that the model can call; on the command line, `--tool`."""
    tool_choice: str = "auto"
    """As in `Request`."""
    parallel_tool_calls: bool = True

    def check(self, task: Task) -> None:
        self.message_template(task)

    @field_validator("tools", mode="before")
    @classmethod
    def _of_functions(cls, given: Any) -> tuple[Tool, ...]:
        if isinstance(given, str):
            raise ValueError("name tools with --tool, or in solve(..., tools=[...])")
        tools = tuple(one if isinstance(one, Tool) else Tool(one) for one in given)
        names = [tool.name for tool in tools]
        if twice := next((name for i, name in enumerate(names) if name in names[:i]), None):
            raise ValueError(f"two tools are named {twice}: rename one")
        return tools

    @field_serializer("tools")
    def _names(self, tools: tuple[Tool, ...]) -> list[str]:
        return [tool.name for tool in tools]

    async def propose(self, ctx: Context, nodes: Sequence[Node], count: int | None) -> list[list[Proposal]]:
        number = count or self.thoughts
        return await ctx.each(
            nodes, lambda node: self.sample(ctx, node, ctx.task.thought[-1], number, self.temperature)
        )

    async def sample(
        self, ctx: Context, node: Node, template: str, n: int, temperature: float, call: int = 0
    ) -> list[Proposal]:
        """Sample n turns after a node, as one request. `call` distinguishes requests with the same template."""
        tools: dict[str, Any] = {}
        if self.tools:
            tools = {name: getattr(self, name) for name in ("tool_choice", "parallel_tool_calls")}
            tools["tools"] = tuple(tool.about for tool in self.tools)
        replies = await ctx.ask(template, node, n, temperature=temperature, call=call, tools=tools)
        running: _Running = {}

        async def read(number: int, reply: Reply) -> Proposal:
            proposal = Proposal(None, reply.usage, prior=1 / n, decoder=reply.decoder, calls=reply.calls)
            try:
                proposal.thought = None if reply.cut else await self._turn(ctx, number, reply, running)
            except ValueError as error:
                cut = "the text was truncated, raise max_tokens: " if reply.truncated else ""
                proposal.parse_failures, proposal.refused = 1, f"{cut}{error}"
            return proposal

        return await ctx.each(list(enumerate(replies)), lambda one: read(*one))

    async def _turn(self, ctx: Context, number: int, reply: Reply, running: _Running) -> Thought:
        """Return the turn in a reply, with the results of its calls. Raises ValueError if it is rejected."""
        template, task = reply.template, ctx.task
        text, calls = reply.turn
        about: dict[str, Any] = {"drawn": reply.sampled(template), "truncated": reply.truncated}
        if not calls:
            broken = [form for form in (*FORMS, OWN) if form.trigger in text and (reply.truncated or not form.alone)]
            answer = None if self.tool_choice != "auto" else task.parse_thought(template, text)
            if answer is None or (self.tools and broken):
                raise ValueError(f"{text[:60]!r} is no complete call of a function, and no answer")
            return Thought.turn(template, Message(role="assistant", content=answer), ended=True, **about)
        seed = reply.request.sampling.seed
        calls = tuple(one.model_copy(update={"id": f"call_{derive(seed, number, i):x}"}) for i, one in enumerate(calls))
        chosen = [self._checked(call) for call in calls]
        message = Message(role="assistant", content=text.strip(), tool_calls=calls)
        name = template if task.schema(template) is None else "calls"
        if not all(tool.readonly for tool, _ in chosen):
            return Thought.turn(name, message, ended=True, **about)
        keys = [(call.name, canonical(from_json(call.arguments))) for call in calls]
        for key, (tool, arguments) in zip(keys, chosen, strict=True):
            if key not in running:
                running[key] = asyncio.ensure_future(tool.call(arguments))
        texts = await asyncio.gather(*(running[key] for key in keys))
        pairs = zip(calls, texts, strict=True)
        results = (Message(role="tool", content=text, tool_call_id=call.id) for call, text in pairs)
        return Thought.turn(name, message, *results, **about)

    def _checked(self, call: ToolCall) -> tuple[Tool, Mapping[str, Any]]:
        """Return the tool and the arguments of a call. Raises ValueError if they are invalid."""
        call.check()
        if (tool := next((one for one in self.tools if one.name == call.name), None)) is None:
            known = ", ".join(tool.name for tool in self.tools)
            raise ValueError(f"there is no function {call.name[:64]!r}: the functions are {known[:200]}")
        return tool, tool.check(call.arguments)
