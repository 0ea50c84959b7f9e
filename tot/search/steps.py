"""Steps: the requests of a search. Expand or evaluate some nodes, or run other generators of steps concurrently.

A step does not determine who executes it: a model, a table or a person.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from typing import Any

from tot.decoders.request import Purpose
from tot.tree.thought import State
from tot.tree.tree import Node


@dataclass(frozen=True, slots=True, eq=False)
class Expand:
    """Request thoughts after each of `nodes`."""

    nodes: tuple[Node, ...]
    states: tuple[State, ...]
    count: int | None
    """Number of thoughts per node; None uses the generator's default."""
    whole: bool = False
    """Request whole solutions instead of single thoughts, as the baselines do."""
    sample: int | None = None
    """Request only the sample with this number of the `count` thoughts, so that each can end on its own."""
    purpose: Purpose = "generate"
    """Whose decoder writes the thoughts."""
    turn: int = 0
    """How often one of the nodes was expanded before, without `sample`. Set by the search: each turn has its seeds."""


@dataclass(frozen=True, slots=True, eq=False)
class Evaluate:
    """Request the value of each of `nodes`."""

    nodes: tuple[Node, ...]
    states: tuple[State, ...]
    fast: bool = False
    """Use the cheap evaluator, whose value counts until a node is visited (RAP's fast reward)."""


@dataclass(frozen=True, slots=True, eq=False)
class Fork:
    """Run generators of steps concurrently, and continue when all of them have ended."""

    branches: tuple[Steps, ...]


Step = Expand | Evaluate
Steps = Generator[Step | Fork, list[Node], Any]
"""A search algorithm, or a branch of one: it yields steps and receives the new children or the evaluated nodes.

A branch that returns True ends its fork: the other branches are cancelled.
"""
