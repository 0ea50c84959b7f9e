"""Steps: the requests of a search. Expand or evaluate some nodes, or run other generators of steps concurrently.

A step does not determine who executes it: a model, a table or a person.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any

from tot.decoders.errors import TaskError
from tot.decoders.request import Purpose
from tot.task.checked import user_code
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


@dataclass(eq=False)
class _Branch:
    """A generator of steps, and its state between two steps."""

    steps: Steps
    parent: _Branch | None = None
    """The branch that has forked it, and waits for it."""
    step: Step | None = None
    """The step whose results it waits for."""
    nodes: list[Node] | None = None
    """The results of its last step, to be sent; None before its first step."""
    unfinished: int = 0
    """Number of branches of its fork that have not ended."""

    def is_below(self, other: _Branch) -> bool:
        return self.parent is not None and (self.parent is other or self.parent.is_below(other))


class Branches:
    """The branches of a search. The last one received results most recently."""

    def __init__(self, name: str, steps: Steps, prepare: Callable[[Step | Fork], Step | Fork]) -> None:
        """Start with one branch.

        Args:
            name: Name of the search, for errors.
            steps: The first branch.
            prepare: Called with each step before it is pending; it may change the step. A step without nodes has no
                results to wait for.
        """
        self.stopped = False
        """Set to run no branch any more."""
        self._name = name
        self._prepare = prepare
        self._active = deque([_Branch(steps)])
        """The branches that do not wait for branches of their own."""

    @property
    def pending(self) -> list[Step]:
        """The steps whose results are missing."""
        return [branch.step for branch in self._active if branch.step is not None]

    def receive(self, step: Step, nodes: list[Node]) -> None:
        """Take the results of a pending step."""
        branch = next(one for one in self._active if one.step is step)
        branch.step, branch.nodes = None, nodes
        self._active.remove(branch)
        self._active.append(branch)

    def advance(self) -> None:
        """Run every branch to its next step."""
        queue, self._active = self._active, deque()
        while queue:
            branch = queue.popleft()
            if self.stopped or branch.step is not None or self._run(branch, queue):
                self._active.append(branch)

    def _run(self, branch: _Branch, queue: deque[_Branch]) -> bool:
        """Run a branch to its next step. Return False if it has none: it has ended, or waits for other branches."""
        while not self.stopped:
            with user_code(f"{self._name}.steps"):
                try:
                    step = next(branch.steps) if branch.nodes is None else branch.steps.send(branch.nodes)
                except StopIteration as end:
                    self._end(branch, queue, alone=end.value is True)
                    return False
            nodes = getattr(step, "nodes", ())
            if not isinstance(step, Expand | Evaluate | Fork) or not all(isinstance(node, Node) for node in nodes):
                raise TaskError(
                    f"{self._name}.steps yielded {step!r:.100}: yield search.expand(nodes, ...), "
                    "search.evaluate(nodes) or search.fork(branches)"
                )
            step, branch.nodes = self._prepare(step), []
            if isinstance(step, Fork) and step.branches:
                branch.unfinished = len(step.branches)
                queue.extend(_Branch(steps, branch) for steps in step.branches)
                return False
            if not isinstance(step, Fork) and step.nodes:
                branch.step = step
                return True
        return False

    def _end(self, branch: _Branch, queue: deque[_Branch], alone: bool) -> None:
        """Resume the parent of an ended branch after its last branch. With `alone`, drop the others first."""
        if (parent := branch.parent) is None:
            return
        parent.unfinished = 0 if alone else parent.unfinished - 1
        if not parent.unfinished:
            for branches in (queue, self._active):
                for other in [one for one in branches if one.is_below(parent)]:
                    branches.remove(other)
            queue.append(parent)
