"""Tools: plain Python functions with type hints, which a model may call in what it writes.

A call is a line as Python's prompt would have it, `>>> calculator("3 * 4")`, with literals alone: it is parsed, never
executed. Its result is text that is put behind it, cut where it is long.
"""

from __future__ import annotations

import ast
import asyncio
import inspect
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, get_type_hints

from pydantic import ConfigDict, ValidationError, field_serializer, field_validator, validate_call

from tot.decoders.errors import OptionError, readable
from tot.generators.continuation import Continue
from tot.llm.context import Context
from tot.llm.replies import Proposal, Reply
from tot.tree.thought import Observation
from tot.tree.tree import Node

PROMPT = ">>> "
"""What a call begins with."""
_RESULT = 1000
"""Characters of a result that are kept."""
_NO_LITERALS = ("date_type", "datetime_type", "time_type", "time_delta_type", "is_instance_of")
_SECONDS = 10.0
"""How long a tool may take."""


class Tool:
    """One function, as a model is told of it, and as it is called. Raises OptionError for what is none."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        self.name = getattr(function, "__name__", "")
        if not callable(function) or not self.name.isidentifier():
            raise OptionError(f"tool {function!r} is no function with a name: write it with def")
        try:
            self._signature, hints = inspect.signature(function), get_type_hints(function)
        except (NameError, TypeError, ValueError) as error:
            raise OptionError(f"tool {self.name}: its type hints can't be read ({error})") from None
        for parameter in self._signature.parameters.values():
            if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
                raise OptionError(f"tool {self.name} takes any arguments (*{parameter.name}): name each, with its type")
            if parameter.name not in hints:
                raise OptionError(
                    f"tool {self.name} has no type for {parameter.name!r}: write {parameter.name}: str, say"
                )
        self._strict, self._lax = validate_call(config=ConfigDict(strict=True))(function), validate_call(function)

    def __repr__(self) -> str:
        return self.name

    def __str__(self) -> str:
        """Its signature and its docstring, of which examples tell a model most."""
        about = (inspect.getdoc(self.function) or "").replace("\n", "\n    ")
        return f"{self.name}{self._signature}" + (f"\n    {about}" if about else "")

    async def call(self, arguments: Sequence[Any], named: dict[str, Any]) -> str:
        """What a call gives, or what is wrong with it, as a line or more of text; a tool that hangs is left behind."""
        try:
            self._signature.bind(*arguments, **named)
            given = await asyncio.wait_for(self._run(arguments, named), _SECONDS)
        except TimeoutError:
            return f"{self.name} did not answer within {_SECONDS:g} s"
        except ValidationError as error:
            return f"{self.name}: {readable(error)}"
        except Exception as error:  # whatever a tool raises  # noqa: BLE001
            return f"{type(error).__name__}: {error}"
        return given if isinstance(given, str) else repr(given)

    async def _run(self, arguments: Sequence[Any], named: dict[str, Any]) -> Any:
        if inspect.iscoroutinefunction(self.function):
            try:
                return await self._strict(*arguments, **named)
            except ValidationError as error:
                if not _is_written_as_text(error):
                    raise
            return await self._lax(*arguments, **named)
        loop = asyncio.get_running_loop()
        result: asyncio.Future[Any] = loop.create_future()

        def tell(tool: Callable[[], None]) -> None:
            with suppress(RuntimeError):  # the loop is closed: nobody waits any more
                loop.call_soon_threadsafe(lambda: None if result.done() else tool())

        def work() -> None:
            try:
                try:
                    given = self._strict(*arguments, **named)
                except ValidationError as error:
                    if not _is_written_as_text(error):
                        raise
                    given = self._lax(*arguments, **named)
            except BaseException as error:  # handed to who waits  # noqa: BLE001
                raised = error if isinstance(error, Exception) else RuntimeError(repr(error))
                tell(lambda: result.set_exception(raised))
            else:
                tell(lambda: result.set_result(given))

        threading.Thread(target=work, name=f"tool {self.name}", daemon=True).start()  # one that hangs ends with us
        return await result


def _is_written_as_text(error: ValidationError) -> bool:
    """True if all that is wrong are texts in place of dates, times, decimals and the like, which no literal can be."""
    return all(each["type"] in _NO_LITERALS and isinstance(each["input"], str) for each in error.errors())


def told(tools: Sequence[Tool]) -> str:
    """What a model is told of the tools that it has."""
    functions = "\n\n".join(map(str, tools))
    return (
        "You have tools: functions that are there already, so never define them. To use one, call it on a line of its "
        f"own that begins with {PROMPT.strip()}, and its result will be on the next line. These are the functions:\n\n"
        f"{functions}\n\nUse them wherever they help."
    )


async def observed(line: str, tools: Sequence[Tool]) -> Observation:
    """What comes of a call as a model wrote it: the result, or what is wrong with it."""
    text = await _result(line, {tool.name: tool for tool in tools})
    if len(text) > _RESULT:
        text = f"{text[:_RESULT]}… (cut: {len(text)} characters)"
    return Observation(text=text)


async def _result(line: str, tools: dict[str, Tool]) -> str:
    try:
        call = ast.parse(line.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return f"SyntaxError: that is no call of {', '.join(tools)}"
    if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name):
        return f"SyntaxError: that is no call of {', '.join(tools)}"
    tool = tools.get(call.func.id)
    if tool is None:
        return f"NameError: there is no {call.func.id}, but {', '.join(tools)}"
    try:
        arguments = [ast.literal_eval(each) for each in call.args]
        named = {each.arg: ast.literal_eval(each.value) for each in call.keywords if each.arg is not None}
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        return "ValueError: write the arguments out, as numbers and texts"
    if len(named) != len(call.keywords):
        return "ValueError: write the arguments out, as numbers and texts"
    return await tool.call(arguments, named)


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
