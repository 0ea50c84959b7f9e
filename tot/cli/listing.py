"""`tot list`: tasks, searches, generators, evaluators and decoders by name, with their options and defaults."""

from __future__ import annotations

import ast
import inspect
import textwrap
from itertools import pairwise
from typing import Annotated, Any

import typer
from pydantic import BaseModel
from pydantic_core import PydanticUndefined
from rich.table import Table
from rich.text import Text

from tot.decoders.errors import OptionError, describe, unknown
from tot.report.terminal import console

KINDS = ("tasks", "searches", "generators", "evaluators", "decoders")


def list_command(
    kind: Annotated[str | None, typer.Argument(help=f"{', '.join(KINDS)}; all of them by default.")] = None,
    name: Annotated[str | None, typer.Argument(help="One of them, with its options.")] = None,
) -> None:
    """List tasks, searches, generators, evaluators and decoders; with NAME, the options of one."""
    if kind is not None and kind not in KINDS:
        raise OptionError(unknown("kind", kind, KINDS))
    if name is not None:
        _show_one(str(kind), name)
        return
    for one in KINDS if kind is None else (kind,):
        registry = _registry(one)
        table = Table.grid(padding=(0, 2))
        for known in registry:
            table.add_row(f"  {known}", Text(_summary_of(registry, known), style="dim"))
        console().print(Text(one, style="bold"), table, sep="\n")


def _registry(kind: str) -> Any:
    from tot import registry
    from tot.decoders.decoder import METHODS

    known = {"tasks": registry.TASKS, "searches": registry.SEARCHES, "generators": registry.GENERATORS}
    return {**known, "evaluators": registry.EVALUATORS, "decoders": METHODS}[kind]


def _show_one(kind: str, name: str) -> None:
    part = _registry(kind).find(name)
    described = _described(part)
    page = console()
    page.print(Text(name, style="bold"))
    page.print(inspect.cleandoc(described.__doc__ or ""))
    if isinstance(described, type) and issubclass(described, BaseModel) and described.model_fields:
        table = Table.grid(padding=(0, 2))
        for option, default, text in options_of(described):
            table.add_row(f"  {option}={default}", Text(text, style="dim"))
        page.print("\nOptions and defaults:", table, sep="\n")
    elif kind == "tasks":
        page.print(f"\nDefault search: {described.search}, generator: {described.generator}", sep="\n")
        page.print(f"Default evaluator: {described.evaluator}, depth: {described.depth}")


def _summary_of(registry: Any, name: str) -> str:
    try:
        return summary(_described(registry[name]))
    except Exception as error:  # another distribution's part may fail to import  # noqa: BLE001
        return f"cannot be imported ({describe(error)})"


def _described(part: Any) -> Any:
    """The class whose docstring and fields describe a part: for a decoding method its options."""
    return getattr(part, "options", part) if not isinstance(part, type) else part


def summary(part: Any) -> str:
    """The first sentence of a docstring."""
    text = " ".join(inspect.cleandoc(part.__doc__ or "").split("\n\n")[0].split())
    return text.partition(". ")[0].rstrip(".")


def options_of(model: type[BaseModel]) -> list[tuple[str, str, str]]:
    """Name, default and description of each field."""
    texts = _attribute_docs(model)
    found = []
    for name, field in model.model_fields.items():
        default = field.get_default(call_default_factory=True) if not field.is_required() else PydanticUndefined
        shown = "(required)" if default is PydanticUndefined else _as_written(default)
        found.append((name, shown, field.description or " ".join(texts.get(name, "").split())))
    return found


def _as_written(default: Any) -> str:
    if isinstance(default, tuple):
        return "-".join(map(str, default))
    return str(default).lower() if isinstance(default, bool) else str(default)


def _attribute_docs(model: type) -> dict[str, str]:
    """The docstring below each attribute, also of classes that the model extends."""
    found: dict[str, str] = {}
    for base in reversed(model.__mro__):
        try:
            (body,) = ast.parse(textwrap.dedent(inspect.getsource(base))).body
        except (OSError, TypeError, ValueError, SyntaxError):
            continue
        lines = getattr(body, "body", [])
        for field, below in pairwise(lines):
            is_text = isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant)
            if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and is_text:
                found[field.target.id] = str(below.value.value)
    return found
