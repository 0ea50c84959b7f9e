"""Tasks, searches, thought generators and state evaluators by name, as the command line and tasks spell them.

A name may carry options: "mcts:iterations=20,exploration=2", "my_parts.py:Mine:width=3".
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from pydantic import BaseModel

from tot.compatibility import check_parts
from tot.decoders.errors import OptionError, unknown, validated
from tot.decoders.registry import Registry
from tot.generators.base import Generator
from tot.search.base import Search
from tot.task.task import Task

TASKS = Registry("task", "tot.tasks")
SEARCHES = Registry("search", "tot.searches")
GENERATORS = Registry("generator", "tot.generators")
EVALUATORS = Registry("evaluator", "tot.evaluators")
TOOLS = Registry("tool", "tot.tools")

_WITH_TOOLS = "bfs:thoughts=2,breadth=4,select=all,aggregate=majority"
_NEEDED = {"search": ("start", "steps"), "generator": ("propose",), "evaluator": ("evaluate", "key")}
_SPEC = re.compile(r"\s*(?P<name>.*?\.py\s*:[^:]*|[^:]*)(?::(?P<options>.*))?", re.DOTALL)


def named(spec: Any, known: Registry, **options: Any) -> Any:
    """The object that a text such as "mcts:iterations=20" names; an object is itself.

    `options` are set besides those in the text, where they are not None. Raises OptionError for a name or an option
    that is not known.
    """
    wanted = {option: value for option, value in options.items() if value is not None}
    kind = known.kind
    if not isinstance(spec, str):
        if wanted and isinstance(spec, BaseModel):
            text, name = ", ".join(f"{option}={value!r}" for option, value in wanted.items()), type(spec).__name__
            remedy = f"give {name}({text})" if wanted.keys() <= type(spec).model_fields.keys() else "leave it out"
            raise OptionError(f"{text} can't be set on a {kind} object: {remedy}")
        return _complete(_checked(kind, spec))
    split = _SPEC.fullmatch(spec)
    assert split is not None  # whatever comes before the first colon is a name
    name = split["name"].strip()
    found = known.find(name)
    given = {}
    for pair in filter(None, (split["options"] or "").split(",")):
        option, equals, value = (piece.strip() for piece in pair.partition("="))
        if not equals:
            raise OptionError(f"{kind} {spec!r}: {pair!r} is no option: write {name}:option=value,option=value")
        given[option] = None if value.lower() == "none" and option != "rollout" else value
    if not isinstance(found, type):
        raise OptionError(f"{kind} {name} is no class: give one that is made with options")
    if not issubclass(found, BaseModel):
        return _checked(kind, found(**given, **wanted))
    return _complete(_checked(kind, validated(found, given | wanted, f"{kind} {name}")))


def _checked(kind: str, part: Any) -> Any:
    """An object that has the methods of its kind. Raises OptionError for others, classes among them."""
    if isinstance(part, type):
        raise OptionError(f"{kind}={part.__name__} is a class: give an object of it, {part.__name__}(...)")
    missing = [method for method in _NEEDED[kind] if not callable(getattr(part, method, None))]
    if missing:
        raise OptionError(f"{kind}={part!r} has no method {missing[0]!r}: give a {kind}, or the name of one")
    return part


def _complete(part: Any) -> Any:
    """A search whose evaluators are named, with the evaluators."""
    return part.resolved(lambda name: named(name, EVALUATORS)) if isinstance(part, Search) else part


def parts_of(
    task: Task,
    search: Any = None,
    generator: Any = None,
    evaluator: Any = None,
    *,
    tools: Sequence[Any] = (),
    search_options: Mapping[str, Any] | None = None,
    generator_options: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """The search, generator and evaluator that texts, objects or None (the task's own) stand for.

    A search may bring a generator and an evaluator, as "rap" does; with `tools`, functions or their names, the model
    may call them in a message that is written piece by piece. The options are set besides those in the texts, where
    they are not None.

    Raises:
        OptionError: a part is not known, or parts cannot work together.
        TaskError: the task lacks a method or a template that a part needs.
    """
    if tools:
        search, generator = search or _WITH_TOOLS, generator or "continue"
    chosen = named(search or task.search, SEARCHES, **search_options or {})
    recipe = {"search": chosen, "generator": task.generator, "evaluator": task.evaluator}
    recipe |= chosen.recipe(task, named(task.generator, GENERATORS))
    parts = {
        "search": recipe["search"],
        "generator": named(generator or recipe["generator"], GENERATORS, **generator_options or {}),
        "evaluator": named(evaluator or recipe["evaluator"], EVALUATORS),
    }
    if tools:
        if getattr(parts["search"], "whole", False):
            raise OptionError(
                f"{type(parts['search']).__name__} has solutions written in one go, which can't wait for a tool: "
                "choose bfs, dfs, best-first or mcts"
            )
        functions = [TOOLS.find(each) if isinstance(each, str) else each for each in tools]
        able = getattr(parts["generator"], "with_tools", partial(Generator.with_tools, parts["generator"]))
        parts["generator"] = able(functions)
    check_parts(task, **parts, own=named(task.evaluator, EVALUATORS))
    return parts


def rap(task: Task | type[Task] | str) -> dict[str, Any]:
    """RAP for a task as options of `solve`: `solve(task, question, **rap(task))` (see `tot.search.mcts`)."""
    return {**parts_of(load_task(task), "rap"), "prompts": "papers"}


def load_task(task: Task | type[Task] | str) -> Task:
    """A task object from an object, a class, the name of an installed one, or "path/to/file.py:ClassName".

    Raises OptionError naming the choices, and TaskError for a file that can't be run.
    """
    if isinstance(task, Task):
        return task
    found = TASKS.find(task, Task) if isinstance(task, str) else task
    if not (isinstance(found, type) and issubclass(found, Task)):
        raise OptionError(f"{unknown('task', str(task), TASKS)}; or path/to/file.py:Name of a class of Task")
    return found()
