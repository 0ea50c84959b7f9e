"""Branch: a generator of steps of a search, which runs independently of the search's other branches."""

from __future__ import annotations

from dataclasses import dataclass

from tot.search.steps import Step, Steps
from tot.tree.tree import Node


@dataclass(eq=False)
class Branch:
    """A generator of steps, and its state between two steps."""

    steps: Steps
    step: Step | None = None
    """The step whose results it waits for."""
    nodes: list[Node] | None = None
    """The results of its last step, to be sent; None before its first step."""

    def next(self) -> Step | None:
        """Run the generator to its next step. Return None at its end."""
        try:
            return next(self.steps) if self.nodes is None else self.steps.send(self.nodes)
        except StopIteration:
            return None
