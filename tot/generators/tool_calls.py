"""Tools: plain Python functions with type hints, which a model may call in what it writes.

A call is a line as Python's prompt would have it, `>>> calculator("3 * 4")`, with literals alone: it is parsed, never
executed. Its result is text that is put behind it, cut where it is long.
"""

from __future__ import annotations

import ast
import asyncio
import inspect
from collections.abc import Callable, Sequence
from typing import Any, get_type_hints

from pydantic import ConfigDict, ValidationError, validate_call

from tot.decoders.errors import OptionError, readable
from tot.running import in_daemon_thread
from tot.tree.thought import Observation

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

        def work() -> Any:
            try:
                return self._strict(*arguments, **named)
            except ValidationError as error:
                if not _is_written_as_text(error):
                    raise
                return self._lax(*arguments, **named)
            except (KeyboardInterrupt, SystemExit) as error:  # they would end the event loop
                raise RuntimeError(repr(error)) from None

        return await asyncio.wrap_future(in_daemon_thread(work, f"tool {self.name}"))  # one that hangs ends with us


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
