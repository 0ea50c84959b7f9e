"""Steps: the requests of a search, to expand or to evaluate some nodes.

A step does not determine who executes it: a model, a table or a person.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Generator
from dataclasses import dataclass, field

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
    partial: bool = False
    """Return when at least one of the requested solutions or thoughts has ended. The others continue, and later steps
    with `partial` return them. When the search ends, the unfinished ones are cancelled."""
    turn: int = 0
    """How often one of the nodes has been expanded before. Set by the search: each turn has its own seeds."""
    purpose: Purpose = "generate"
    """Whose decoder writes the thoughts. With another purpose than before, unfinished solutions are cancelled."""


@dataclass
class Requested:
    """The thoughts that steps have requested: their number, for `partial` steps, and the turns of nodes."""

    unfinished: int = 0
    """Solutions whose results have not arrived."""
    received: int = 0
    """Solutions whose results have arrived."""
    together: int = 1
    """Solutions that the last step with new ones requested."""
    purpose: Purpose = "generate"

    turns: defaultdict[int, int] = field(default_factory=lambda: defaultdict(int))
    """By node: how often it was expanded, apart from `partial` steps."""

    def add(self, step: Expand) -> int:
        """Count the solutions of a step. Unfinished ones of another purpose are cancelled. Return the step's turn."""
        if not step.partial:
            turn = max((self.turns[node.id] for node in step.nodes), default=0)
            self.turns.update({node.id: turn + 1 for node in step.nodes})
            return turn
        kept = self.unfinished if step.purpose == self.purpose else 0
        self.unfinished, self.purpose = kept + (step.count or 0), step.purpose
        self.together = step.count or self.together
        return 0

    def receive(self, number: int) -> None:
        """Count results."""
        self.unfinished, self.received = self.unfinished - number, self.received + number


@dataclass(frozen=True, slots=True, eq=False)
class Evaluate:
    """Request the value of each of `nodes`."""

    nodes: tuple[Node, ...]
    states: tuple[State, ...]
    fast: bool = False
    """Use the cheap evaluator, whose value counts until a node is visited (RAP's fast reward)."""


Step = Expand | Evaluate
Steps = Generator[Step, list[Node], None]
"""A search algorithm: it yields steps and receives the new children or the evaluated nodes."""
