"""The errors a user may meet: one family, each message saying what is wrong and what to do."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


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


def unknown(kind: str, name: str, choices: Iterable[str]) -> str:
    """One line about a name that is not among the choices."""
    known = sorted(choices)
    near = difflib.get_close_matches(name, known, n=1)
    hint = f" (did you mean {near[0]}?)" if near else ""
    return f"unknown {kind} {name!r}{hint}: choose one of {', '.join(known)}"
