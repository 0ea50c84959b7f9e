"""Steps: what a search asks for, thoughts after some nodes or values of some nodes.

A step does not say who does the work: a model, a table or a person.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass

from tot.tree.thought import State
from tot.tree.tree import Node


@dataclass(frozen=True, slots=True)
class Expand:
    """Wanted: thoughts after each of `nodes`."""

    nodes: tuple[Node, ...]
    states: tuple[State, ...]
    count: int | None
    """How many after each; None leaves it to whoever makes them."""
    whole: bool = False
    """Whole solutions rather than single thoughts: what the baselines ask for."""


@dataclass(frozen=True, slots=True)
class Evaluate:
    """Wanted: the value of each of `nodes`."""

    nodes: tuple[Node, ...]
    states: tuple[State, ...]
    fast: bool = False
    """A cheap judgement that stands in until a node is visited (RAP's fast reward)."""


Step = Expand | Evaluate
Steps = Generator[Step, list[Node], None]
"""A search's algorithm: steps go out; the new children, or the nodes that were evaluated, come back."""
