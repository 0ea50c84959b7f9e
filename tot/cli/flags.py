"""Generate command-line options from the fields of pydantic models, and check output files."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin

import typer
from annotated_types import Ge, Le
from pydantic import BaseModel

from tot.decoders.errors import OptionError


def takes(*models: type[BaseModel]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Replace a command's parameter `given` by an option for each field of `models` with a description.

    The command receives in `given` the options on the command line only; other fields keep the models' defaults.
    """

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        signature = inspect.signature(command, eval_str=True)
        flags = {name: flag for model in models for name, flag in _flags(model).items()}
        takes_context = "context" in signature.parameters

        @functools.wraps(command)
        def run(context: typer.Context, **values: Any) -> None:
            given = {name: values.pop(name) for name in flags}
            values |= {"context": context} if takes_context else {}
            command(given={name: value for name, value in given.items() if is_given(context, name)}, **values)

        parameters = [inspect.Parameter("context", inspect.Parameter.KEYWORD_ONLY, annotation=typer.Context)]
        for name, parameter in signature.parameters.items():
            if name != "context":
                parameters += flags.values() if name == "given" else [parameter.replace(kind=parameter.KEYWORD_ONLY)]
        run.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
        return run

    return decorate


def is_given(context: typer.Context, name: str) -> bool:
    """Return whether an option is given on the command line."""
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def _flags(model: type[BaseModel], prefix: str = "") -> dict[str, inspect.Parameter]:
    """Return the model's own options, then its base class's. A nested model adds options with the field as prefix."""
    flags: dict[str, inspect.Parameter] = {}
    for name, field in sorted(model.model_fields.items(), key=lambda item: item[0] not in model.__annotations__):
        inner = next((kind for kind in get_args(field.annotation) if _is_model(kind)), None)
        if inner is not None:
            flags |= _flags(inner, f"{name}_")
        if field.description is None:
            continue
        low = next((bound.ge for bound in field.metadata if isinstance(bound, Ge)), None)
        high = next((bound.le for bound in field.metadata if isinstance(bound, Le)), None)
        extra = field.json_schema_extra if isinstance(field.json_schema_extra, dict) else {}
        names = [str(extra["flag"])] if "flag" in extra else []
        option = typer.Option(*names, help=field.description, min=low, max=high)  # type: ignore[arg-type]
        default, kind = None if field.is_required() else field.default, field.annotation
        if extra.get("text"):  # parsed by the model
            default, kind = None, str | None
        elif extra:  # a repeatable option, likewise
            default, kind = [], list[str]
        elif get_origin(kind) is tuple:  # comma-separated values, split by the model
            default, kind = ",".join(map(str, field.default)), str
        elif kind is Any:
            kind = str | None
        flags[prefix + name] = inspect.Parameter(
            prefix + name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind, option]
        )
    return flags


def _is_model(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, BaseModel)


def writable(out: Path) -> Path:
    """Return `out` if the file can be created. Raises OptionError, naming --out."""
    if not out.resolve().parent.is_dir():
        raise OptionError(f"--out {out}: the folder {out.resolve().parent} does not exist: create it first")
    if out.is_dir():
        raise OptionError(f"--out {out} is a folder: give a file in it")
    return out
