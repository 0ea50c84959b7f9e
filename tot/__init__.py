"""Reasoning with trees of thoughts on language models that you run yourself.

    from tot import solve, BFS
    solution = solve("gsm8k", "Natalia sold clips to 48 …", model="smollm2-135m", search=BFS(thoughts=3, breadth=3))

Names are imported when first used: `import tot` is cheap, and `tot.decoders` stands without the search layer.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tot.decoders.budget import Budget
    from tot.decoders.decoder import load_decoder
    from tot.decoders.errors import TotError
    from tot.search import BFS, Search
    from tot.solver import Solution, asolve, solve
    from tot.state import State, Thought
    from tot.task import Task
    from tot.thoughts import Sample
    from tot.tree import Node, ThoughtTree
    from tot.values import Likelihood, Value

_HOME = {
    "decoders.budget": ("Budget",),
    "decoders.decoder": ("load_decoder",),
    "decoders.errors": ("TotError",),
    "search": ("BFS", "Search"),
    "solver": ("Solution", "asolve", "solve"),
    "state": ("State", "Thought"),
    "task": ("Task",),
    "thoughts": ("Sample",),
    "tree": ("Node", "ThoughtTree"),
    "values": ("Likelihood", "Value"),
}
_MODULE_OF = {name: module for module, names in _HOME.items() for name in names}

__all__ = [
    "BFS",
    "Budget",
    "Likelihood",
    "Node",
    "Sample",
    "Search",
    "Solution",
    "State",
    "Task",
    "Thought",
    "ThoughtTree",
    "TotError",
    "Value",
    "asolve",
    "load_decoder",
    "solve",
]


def __getattr__(name: str) -> Any:
    module = _MODULE_OF.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{module}"), name)
