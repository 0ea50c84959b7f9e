"""Shared helpers of the BFS tests: run a search and read its tree.

They are fixtures because the import mode is importlib.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tot import BFS, Solution, ThoughtTree, Value
from tot.api import run_search
from tot.config import SearchConfig
from tot.running import run_to_end


def grow(
    task: Any,
    decoder: Any,
    *,
    question: str = "q",
    thoughts: int = 2,
    breadth: int = 2,
    depth: int = 3,
    watch: Any = None,
    **options: Any,
) -> Solution:
    search = BFS(thoughts=thoughts, breadth=breadth, depth=depth)
    config = SearchConfig.of(None, {"decoder": decoder, "search": search, "evaluator": Value(), **options})
    return run_to_end(run_search(task, question, config, watch=watch))


def paths(tree: ThoughtTree) -> list[str]:
    """Return every node's thoughts, in the order in which the nodes were added."""
    return ["/".join(thought.text for thought in tree.state(node).thoughts) for node in tree]


def values(tree: ThoughtTree) -> dict[str, float | None]:
    return {path: node.value for path, node in zip(paths(tree), tree, strict=True) if path}


@pytest.fixture(name="grow")
def _grow() -> Callable[..., Solution]:
    return grow


@pytest.fixture(name="paths")
def _paths() -> Callable[..., list[str]]:
    return paths


@pytest.fixture(name="values")
def _values() -> Callable[..., dict[str, float | None]]:
    return values
