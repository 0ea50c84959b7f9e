"""Registries of tasks, searches, thought generators, state evaluators and tools by name.

A name may have options: "mcts:iterations=20,exploration=2", "my_parts.py:Mine:width=3", "optimize:score=score.py".
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from tot.decoders.errors import OptionError, unknown, validated
from tot.decoders.registry import Registry, split_spec
from tot.evaluators.base import Evaluator, TemplateEvaluator
from tot.generators.base import Generator
from tot.generators.turns import Turns
from tot.search.base import Search
from tot.task.checked import CheckedTask
from tot.task.task import Task
from tot.task.world import HasAnswer

TASKS = Registry("task", "tot.tasks")
SEARCHES = Registry("search", "tot.searches")
GENERATORS = Registry("generator", "tot.generators")
EVALUATORS = Registry("evaluator", "tot.evaluators")
TOOLS = Registry("tool", "tot.tools")

_WITH_TOOLS = "bfs:thoughts=2,breadth=4,select=all,aggregate=majority"
_REQUIRED_METHODS = {"search": ("start", "steps"), "generator": ("propose",), "evaluator": ("evaluate", "key")}
_IN_FILE = re.compile(r"\.py\s*:")
_VARIANT = re.compile(r"([\w-]+):([\w-]+)((?:,.*)?)")
_TEXTS = ("question", "reference", "out")
"""Settings of a saved run that are never names of code."""


def named(spec: Any, known: Registry, **options: Any) -> Any:
    """Return the object for a text such as "mcts:iterations=20"; objects are returned unchanged.

    `options` that are not None are added to the options in the text. Raises OptionError for an unknown name or option.
    """
    overrides = {option: value for option, value in options.items() if value is not None}
    kind = known.kind
    if not isinstance(spec, str):
        if overrides and isinstance(spec, BaseModel):
            text, name = ", ".join(f"{option}={value!r}" for option, value in overrides.items()), type(spec).__name__
            remedy = f"give {name}({text})" if overrides.keys() <= type(spec).model_fields.keys() else "leave it out"
            raise OptionError(f"{text} can't be set on a {kind} object: {remedy}")
        return _checked(kind, spec)
    name, given = split_spec(spec, kind)
    found = known.find(name)
    if not isinstance(found, type):
        raise OptionError(f"{kind} {name} is not a class: give a class")
    if not issubclass(found, BaseModel):
        return _checked(kind, found(**given, **overrides))
    return _checked(kind, validated(found, given | overrides, f"{kind} {name}"))


def spec_of(part: BaseModel) -> str | None:
    """Return the text from which `named` makes an equal search, generator or evaluator; None if no text does."""
    for known in (SEARCHES, GENERATORS, EVALUATORS):
        if name := known.name_of(type(part)):
            options = [f"{option}={_option_text(value)}" for option, value in part if option in part.model_fields_set]
            spec = ":".join(filter(None, (name, ",".join(options))))
            with suppress(OptionError):
                if named(spec, known) == named(part, known):
                    return spec
    return None


def _option_text(value: Any) -> Any:
    if isinstance(value, BaseModel):
        return spec_of(value)
    return "+".join(map(str, value)) if isinstance(value, tuple) else value


def _checked(kind: str, part: Any) -> Any:
    """Return a part that has the methods of its kind. Raises OptionError for classes and other objects."""
    if isinstance(part, type):
        raise OptionError(f"{kind}={part.__name__} is a class: give an object of it, {part.__name__}(...)")
    missing = [method for method in _REQUIRED_METHODS[kind] if not callable(getattr(part, method, None))]
    if missing:
        raise OptionError(f"{kind}={part!r} has no method {missing[0]!r}: give a {kind}, or the name of one")
    return part


def parts_of(
    task: Task,
    search: Any = None,
    generator: Any = None,
    evaluator: Any = None,
    *,
    tools: Sequence[Any] = (),
    until: float | None = None,
    temperature: float | None = None,
) -> dict[str, Any]:
    """Return the search, generator and evaluator for texts, objects or None (the task's own).

    A search may replace the generator and the evaluator, as "rap" does.

    Args:
        tools: Functions, their descriptions or their names, which the model can call.
        until: An option of the search, to add to its text.
        temperature: An option of the generator, likewise.

    Raises:
        OptionError: A part is unknown, or parts cannot work together.
        TaskError: The task lacks a method or a template that a part needs.
    """
    if tools:
        search, generator = search or _WITH_TOOLS, generator or "turns"
    chosen = named(search or task.search, SEARCHES, until=until)
    recipe = {"search": chosen, "generator": task.generator, "evaluator": task.evaluator}
    recipe |= chosen.recipe(task, named(task.generator, GENERATORS))
    parts = {
        "search": recipe["search"],
        "generator": named(generator or recipe["generator"], GENERATORS, temperature=temperature),
        "evaluator": named(evaluator or recipe["evaluator"], EVALUATORS),
    }
    if tools:
        if not isinstance(turns := parts["generator"], Turns):
            raise OptionError(f"generator {type(turns).__name__} does not support tools: leave it out, or use 'turns'")
        functions = [TOOLS.find(tool) if isinstance(tool, str) else tool for tool in tools]
        given = {name: getattr(turns, name) for name in turns.model_fields_set}
        parts["generator"] = validated(type(turns), {**given, "tools": functions}, "generator turns")
    executed = any(tool.readonly for tool in getattr(parts["generator"], "tools", ()))
    if executed and getattr(parts["search"], "whole", False):
        raise OptionError(
            f"{type(parts['search']).__name__} decodes whole solutions at once and executes no tools: choose bfs, dfs, "
            "best-first or mcts, or give Tool(function, readonly=False), whose calls are answers"
        )
    _check_together(task, **parts, own=named(task.evaluator, EVALUATORS))
    return parts


def _check_together(task: Task, search: Any, generator: Any, evaluator: Any, own: Any) -> None:
    """Raise OptionError or TaskError if parts can't work together on the task.

    Objects of other classes are not checked. The task's own evaluator `own` may lack its template: a search may end
    before it evaluates.
    """
    CheckedTask(task).check_schemas()
    if not isinstance(search, Search):
        return
    search.check(task)
    if isinstance(generator, Turns) or (search.expands and isinstance(generator, Generator)):
        generator.check(task)
    if search.evaluates(task):
        for one in (evaluator, search.fast_evaluator):
            if isinstance(one, Evaluator) and not (isinstance(one, TemplateEvaluator) and one == own):
                one.check(task, search, generator)
    if search.expands and not getattr(generator, "writes_answer", False) and not isinstance(task, HasAnswer):
        task.prompts.require("answer")


def refuse_code(options: Mapping[str, Any], place: Path) -> None:
    """Raise OptionError if options that were read from a file name a task, a part or a tool that is not installed.

    The author of a file must not choose the code that runs.
    """
    for name, value in options.items():
        if not is_installed(value) if name == "task" else name not in _TEXTS and _IN_FILE.search(str(value)):
            raise OptionError(
                f"{place} names the {name} {value!r}, which is not installed, so it is not run: name it on the command "
                "line, too, if you trust it"
            )


def is_installed(task: Any) -> bool:
    """Return whether this is the name of an installed task, without options that may name code."""
    return isinstance(task, str) and (task in TASKS or _named_variant(task) is not None)


def _named_variant(task: str) -> str | None:
    """Return "name:option=variant,..." for "name:variant,..." of an installed task with variants, otherwise None."""
    match = _VARIANT.fullmatch(task)
    option = TASKS.find(match[1], Task).variants if match and match[1] in TASKS else ""
    return f"{match[1]}:{option}={match[2]}{match[3]}" if match and option else None


def load_task(task: Task | type[Task] | str) -> Task:
    """Return a task from an object, a class, an installed task's name, or "path/to/file.py:ClassName".

    Names may have options: "optimize:score=score.py". A folder with score.py is a program to optimize. Raises
    OptionError with the known names if it is unknown, TaskError if the file can't be run.
    """
    if isinstance(task, Task):
        return task
    found: Any = task
    options: dict[str, str | None] = {}
    if isinstance(task, str):
        spec = _named_variant(task) or task
        name, options = split_spec(spec, "task") if "=" in spec else (spec, {})
        if name not in TASKS and os.path.isfile(Path(name) / "score.py"):  # noqa: PTH113  (False for a long name)
            name, options = "optimize", {"folder": name, **options}
        found = TASKS.find(name, Task)
    if not (isinstance(found, type) and issubclass(found, Task)):
        raise OptionError(f"{unknown('task', str(task), TASKS)}; or path/to/file.py:Name of a class of Task")
    if options and found.__init__ is Task.__init__:
        raise OptionError(f"task {name} has no options: leave {', '.join(options)} out")
    return found(**options)


def options_to_json(part: object) -> dict[str, Any]:
    """Return the options of a search, generator or evaluator as JSON data."""
    if not isinstance(part, BaseModel):
        return {"name": type(part).__name__}
    options = part.model_dump(mode="json", fallback=lambda value: getattr(value, "__qualname__", type(value).__name__))
    return {"name": type(part).__name__, **options}
