"""Tools: plain Python functions with type hints, which a model can call in its text.

A call is a line in the form of Python's prompt, `>>> calculator("3 * 4")`. Arguments must be literals: the line is
parsed, never executed as code. The result is appended as text, cut to a maximum length.
"""

from __future__ import annotations

import ast
import asyncio
import inspect
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, get_type_hints

from pydantic import ConfigDict, ValidationError, validate_call

from tot.decoders.errors import OptionError, describe, readable
from tot.running import in_thread
from tot.tree.thought import Observation

PROMPT = ">>> "
"""The marker of a call."""
_MAX_RESULT = 1000
"""Maximum length of a result in characters."""
_NO_LITERALS = ("date_type", "datetime_type", "time_type", "time_delta_type", "is_instance_of")
_TIMEOUT = 10.0
"""Timeout of a tool call in seconds."""


class Tool:
    """A Python function that the model can call. Raises OptionError for an unsuitable function."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        self.name = getattr(function, "__name__", "")
        if not callable(function) or not self.name.isidentifier():
            raise OptionError(f"tool {function!r} is not a named function: define it with def")
        try:
            self._signature, hints = inspect.signature(function), get_type_hints(function)
        except (NameError, TypeError, ValueError) as error:
            raise OptionError(f"cannot read the type hints of tool {self.name} ({error})") from None
        for parameter in self._signature.parameters.values():
            if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
                raise OptionError(
                    f"tool {self.name} takes any arguments (*{parameter.name}): name each argument, with its type"
                )
            if parameter.name not in hints:
                raise OptionError(
                    f"tool {self.name} has no type for {parameter.name!r}: write, for example, {parameter.name}: str"
                )
        self._strict, self._lax = validate_call(config=ConfigDict(strict=True))(function), validate_call(function)

    def __repr__(self) -> str:
        return self.name

    def __str__(self) -> str:
        """Return the signature and the docstring. Examples in the docstring help a model most."""
        about = (inspect.getdoc(self.function) or "").replace("\n", "\n    ")
        return f"{self.name}{self._signature}" + (f"\n    {about}" if about else "")

    async def call(self, arguments: Sequence[Any], named: dict[str, Any]) -> str:
        """Call the tool and return the result or the error as text. A tool that hangs is abandoned."""
        try:
            self._signature.bind(*arguments, **named)
            result = await asyncio.wait_for(self._run(arguments, named), _TIMEOUT)
        except TimeoutError:
            return f"{self.name} did not answer within {_TIMEOUT:g} s"
        except ValidationError as error:
            return f"{self.name}: {readable(error)}"
        except Exception as error:  # whatever a tool raises  # noqa: BLE001
            return describe(error)
        return result if isinstance(result, str) else repr(result)

    async def _run(self, arguments: Sequence[Any], named: dict[str, Any]) -> Any:
        try:
            return await self._apply(self._strict, arguments, named)
        except ValidationError as error:
            if not _is_written_as_text(error):
                raise
        return await self._apply(self._lax, arguments, named)

    async def _apply(self, function: Callable[..., Any], arguments: Sequence[Any], named: dict[str, Any]) -> Any:
        call = partial(function, *arguments, **named)
        try:
            if inspect.iscoroutinefunction(self.function):
                return await call()
            # A daemon thread: a hanging tool ends with the process.
            return await in_thread(call, f"tool {self.name}")
        except (KeyboardInterrupt, SystemExit) as error:  # these would end the event loop
            raise RuntimeError(repr(error)) from None


def _is_written_as_text(error: ValidationError) -> bool:
    """Return whether the only errors are texts in place of types without literals, such as dates and decimals."""
    return all(one["type"] in _NO_LITERALS and isinstance(one["input"], str) for one in error.errors())


def tools_prompt(tools: Sequence[Tool]) -> str:
    """Return the part of the prompt that describes the tools."""
    functions = "\n\n".join(map(str, tools))
    return (
        "You have tools: functions that are there already, so never define them. To use one, call it on a line of its "
        f"own that begins with {PROMPT.strip()}, and its result will be on the next line. These are the functions:\n\n"
        f"{functions}\n\nUse them wherever they help."
    )


async def run_call(line: str, tools: Sequence[Tool]) -> Observation:
    """Execute a call that a model wrote. The observation is the result or the error."""
    text = await _result(line, {tool.name: tool for tool in tools})
    if len(text) > _MAX_RESULT:
        text = f"{text[:_MAX_RESULT]}… (cut: {len(text)} characters)"
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
        arguments = [ast.literal_eval(argument) for argument in call.args]
        named = {keyword.arg: ast.literal_eval(keyword.value) for keyword in call.keywords if keyword.arg is not None}
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        return "ValueError: write the arguments out, as numbers and texts"
    if len(named) != len(call.keywords):
        return "ValueError: write the arguments out, as numbers and texts"
    return await tool.call(arguments, named)
