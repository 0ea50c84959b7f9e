"""The errors a user may meet: one family, each message saying what is wrong and what to do; and options checked."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

_Model = TypeVar("_Model", bound=BaseModel)


class TotError(Exception):
    """Base of every error this project raises on purpose."""


class ModelError(TotError):
    """A model can't be found, read, converted or run."""


class RequestError(TotError):
    """A request can't be served as asked: empty, too long, contradictory or larger than the budget."""


class OptionError(TotError):
    """A name or an option is not among the choices."""


class TaskError(TotError):
    """A task, its templates or its data are at fault."""


def reason(error: BaseException) -> str:
    """What another program's error says, on one line: the system's words where it is the system's."""
    return " ".join(str(getattr(error, "strerror", None) or error).split()) or type(error).__name__


def unknown(kind: str, name: str, choices: Iterable[str]) -> str:
    """One line about a name that is not among the choices."""
    known = sorted(choices)
    near = difflib.get_close_matches(name, known, n=1)
    hint = f" (did you mean {near[0]}?)" if near else ""
    return f"unknown {kind} {name!r}{hint}: choose one of {', '.join(known)}"


def readable(error: ValidationError) -> str:
    """What is wrong first, such as "max_tokens = 0: Input should be greater than or equal to 1"."""
    first = error.errors(include_url=False)[0]
    return f"{'.'.join(map(str, first['loc']))} = {first['input']!r}: {first['msg'].removeprefix('Value error, ')}"


def validated(cls: type[_Model], options: Mapping[str, Any], what: str) -> _Model:
    """An options model from values by name. Raises OptionError that says which of `what` can't be taken, without the
    value, which may be a secret, and which there are."""
    try:
        return cls(**options)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        place = f", option {first['loc'][0]}" if first["loc"] else ""
        known = ", ".join(cls.model_fields) or "none"
        reason = first["msg"].removeprefix("Value error, ")
        if first["type"] == "extra_forbidden":
            near = difflib.get_close_matches(str(first["loc"][0]), cls.model_fields, n=1)
            reason = f"unknown, did you mean {near[0]}?" if near else "unknown"
        raise OptionError(f"{what}{place}: {reason} (its options: {known})") from None
