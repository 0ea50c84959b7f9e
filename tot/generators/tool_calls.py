"""Tools: functions that a model can call, with a JSON schema of their arguments from their type hints."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Annotated, Any, NotRequired, get_type_hints

from pydantic import ConfigDict, Field, PydanticUserError, TypeAdapter, ValidationError
from pydantic_core import to_jsonable_python
from typing_extensions import TypedDict

from tot.decoders.errors import OptionError, describe, readable, reason
from tot.decoders.request import Function
from tot.running import in_thread

_MAX_RESULT = 1000
"""Maximum length of a result in characters."""
_TIMEOUT = 10.0
"""Timeout of a call in seconds."""


class Tool:
    """A function that the model can call. Raises OptionError for an unsuitable function.

    A search executes the calls of tools with `readonly`, in each branch, so they must change nothing. A call of another
    tool is never executed: it ends its branch, and is the answer.
    """

    def __init__(self, function: Callable[..., Any] | Function, readonly: bool = True) -> None:
        """`function`: a function with type hints, or the description of one that is elsewhere."""
        self.readonly = readonly and not isinstance(function, Function)
        self.function = None if isinstance(function, Function) else function
        if isinstance(function, Function):
            self.about = function
            return
        name = getattr(function, "__name__", "")
        if not callable(function) or not name.isidentifier():
            raise OptionError(f"tool {function!r} is not a named function: define it with def")
        try:
            self._arguments = _arguments(name, function)
            parameters = self._arguments.json_schema()
            self.about = Function(name=name, description=inspect.getdoc(function) or "", parameters=parameters)
        except ValidationError as error:
            raise OptionError(f"tool {name[:80]}: {readable(error)}: rename it") from None
        except (NameError, PydanticUserError, TypeError, ValueError) as error:
            raise OptionError(f"cannot read the type hints of tool {name} ({reason(error)})") from None

    @property
    def name(self) -> str:
        return self.about.name

    def check(self, arguments: str) -> Mapping[str, Any]:
        """Return the arguments in a JSON text, by name. Raises ValueError if they do not match the type hints."""
        if self.function is None:
            return {}
        try:
            return self._arguments.validate_json(arguments, strict=True)
        except ValidationError as error:
            raise ValueError(f"{self.name}: {readable(error)}") from None
        except Exception as error:  # a validator of the user may raise anything  # noqa: BLE001
            raise ValueError(f"{self.name}: {describe(error)}") from None

    async def call(self, arguments: Mapping[str, Any]) -> str:
        """Call the function and return the result or the error as text. A function that hangs is abandoned."""
        try:
            assert self.function is not None
            result = await asyncio.wait_for(self._run(partial(self.function, **arguments)), _TIMEOUT)
            text = result if isinstance(result, str) else repr(result)
        except TimeoutError:
            text = f"{self.name} did not answer within {_TIMEOUT:g} s"
        except Exception as error:  # whatever a tool raises  # noqa: BLE001
            text = describe(error)
        return text if len(text) <= _MAX_RESULT else f"{text[:_MAX_RESULT]}… (cut: {len(text)} characters)"

    async def _run(self, call: Callable[[], Any]) -> Any:
        try:
            if inspect.iscoroutinefunction(self.function):
                return await call()
            # A daemon thread: a hanging tool ends with the process.
            return await in_thread(call, f"tool {self.name}")
        except (KeyboardInterrupt, SystemExit) as error:  # these would end the event loop
            raise RuntimeError(repr(error)) from None


def _arguments(name: str, function: Callable[..., Any]) -> TypeAdapter[dict[str, Any]]:
    """Return the type of a function's arguments by name. Raises OptionError if one lacks a name or a type."""
    hints = get_type_hints(function, include_extras=True)
    fields: dict[str, Any] = {}
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            given = str(parameter).partition(":")[0]
            raise OptionError(f"tool {name} takes {given} without a name: name each argument, with its type")
        if parameter.name not in hints:
            raise OptionError(
                f"tool {name} has no type for {parameter.name!r}: write, for example, {parameter.name}: str"
            )
        fields[parameter.name] = hints[parameter.name]
        if parameter.default is not parameter.empty:
            default = to_jsonable_python(parameter.default, fallback=repr)
            fields[parameter.name] = NotRequired[
                Annotated[hints[parameter.name], Field(json_schema_extra={"default": default})]
            ]
    make: Any = TypedDict
    arguments = make(name, fields)
    arguments.__pydantic_config__ = ConfigDict(extra="forbid")
    return TypeAdapter(arguments)
