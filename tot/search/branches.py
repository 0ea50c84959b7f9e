"""Branches: the generators of steps of a search that run concurrently."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tot.decoders.errors import TaskError
from tot.search.steps import Evaluate, Expand, Fork, Step, Steps
from tot.task.checked import user_code
from tot.tree.tree import Node


@dataclass(eq=False)
class Branch:
    """A generator of steps, and its state between two steps."""

    steps: Steps
    parent: Branch | None = None
    """The branch that has started it, and waits for it."""
    step: Step | None = None
    """The step whose results it waits for."""
    nodes: list[Node] | None = None
    """The results of its last step, to be sent; None before its first step."""
    unfinished: int = 0
    """Number of branches of its fork that have not ended."""

    def is_below(self, other: Branch) -> bool:
        """Return whether `other` has started this branch, directly or through other branches."""
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
        self._name = name
        self._prepare = prepare
        self._active = deque([Branch(steps)])
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

    def advance(self, stopped: Callable[[], bool]) -> None:
        """Run every branch to its next step, unless the search is `stopped`."""
        queue, self._active = self._active, deque()
        while queue:
            branch = queue.popleft()
            if stopped() or branch.step is not None or self._run(branch, queue, stopped):
                self._active.append(branch)

    def _run(self, branch: Branch, queue: deque[Branch], stopped: Callable[[], bool]) -> bool:
        """Run a branch to its next step. Return False if it has none: it has ended, or waits for other branches."""
        while not stopped():
            with user_code(f"{self._name}.steps"):
                try:
                    step = next(branch.steps) if branch.nodes is None else branch.steps.send(branch.nodes)
                except StopIteration as end:
                    self._end(branch, queue, alone=end.value is True)
                    return False
            step = self._prepare(self._checked(step))
            branch.nodes = []
            if isinstance(step, Fork) and step.branches:
                branch.unfinished = len(step.branches)
                queue.extend(Branch(steps, branch) for steps in step.branches)
                return False
            if not isinstance(step, Fork) and step.nodes:
                branch.step = step
                return True
        return False

    def _checked(self, step: Any) -> Step | Fork:
        nodes = getattr(step, "nodes", ())
        if not isinstance(step, Expand | Evaluate | Fork) or not all(isinstance(node, Node) for node in nodes):
            raise TaskError(
                f"{self._name}.steps yielded {step!r:.100}: yield search.expand(nodes, ...), search.evaluate(nodes) or "
                "search.fork(branches)"
            )
        return step

    def _end(self, branch: Branch, queue: deque[Branch], alone: bool) -> None:
        """Resume the parent of an ended branch after its last branch. With `alone`, drop the others first."""
        if (parent := branch.parent) is None:
            return
        parent.unfinished = 0 if alone else parent.unfinished - 1
        if not parent.unfinished:
            for branches in (queue, self._active):
                for other in [one for one in branches if one.is_below(parent)]:
                    branches.remove(other)
            queue.append(parent)
