"""What passes between a search and whoever does its work: steps to be done, and their results.

A search asks for nodes to be expanded or evaluated; drafts of thoughts and evaluations come back. None of these know
where thoughts come from: a model, a table, a person.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from typing import Annotated

from pydantic import Field

from tot.calls import Call
from tot.decoders.request import Usage
from tot.state import State, Thought
from tot.tree import Node

NOTHING = Usage()
Asked = Annotated[tuple[Call, ...], Field(exclude=True)]
"""What was asked. It goes into the tree, and a trace keeps it there: it is no result that a search goes by."""


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


@dataclass(slots=True)
class Proposal:
    """A thought on its way into the tree; None where its text was rejected or cut off."""

    thought: Thought | None
    usage: Usage = NOTHING
    parse_failures: int = 0
    prior: float | None = None
    """Its probability among its siblings."""
    confidence: float | None = None
    """The share of samples that agreed with it."""
    decoder: str | None = None
    calls: Asked = ()


@dataclass(frozen=True, slots=True)
class Evaluation:
    """A state's value, and what it took. None where a budget cut the evaluation off."""

    value: float | None
    usage: Usage = NOTHING
    parse_failures: int = 0
    parts: tuple[Evaluation, ...] = ()
    """What it was combined from."""
    calls: Asked = ()
