"""Live searches: their trees as they grow, in revisions, and the last searches that have ended."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from copy import copy
from itertools import takewhile
from typing import Any

from tot.search.session import SearchSession, shown_answer
from tot.serving.progress import Progress
from tot.solver import Solution
from tot.tree.calls import calls_to_json
from tot.tree.tree import ThoughtTree, link_to_json

_ENDED = 20
"""Ended searches that are kept at most."""
_THOUGHTS = 20_000
"""Thoughts of ended searches that are kept at most; the last search is always kept."""
_PATCH = 500
"""Changed parts of a tree in a patch at most."""
STOPPED = "stopped on the live page"


class Revisions:
    """Numbers the changes of a tree without a record of them: each part has the number of its last change."""

    def __init__(self, tree: ThoughtTree) -> None:
        self._tree = tree
        self._last = 0
        self._parts: dict[tuple[str, int], tuple[int, Any]] = {}
        """By part (a node, the calls about a node, the links): its last change and its state, ordered by the change."""

    def scan(self) -> None:
        """Find the changes. Another thread may change the tree meanwhile: the next scan finds that."""
        for node in self._tree:
            self._update("node", node.id, node.__dict__)
            if node.id in self._tree.calls:
                self._update("calls", node.id, len(self._tree.calls[node.id]))
        self._update("links", 0, [(tail.id, head.id) for tail, head, _ in self._tree.links()])

    def _update(self, kind: str, node: int, state: Any) -> None:
        if state != self._parts.get((kind, node), (0, None))[1]:
            self._last += 1
            self._parts.pop((kind, node), None)
            self._parts[kind, node] = self._last, copy(state)

    def since(self, seen: int) -> tuple[int, dict[str, Any]] | None:
        """Return a revision after `seen` and its patch, a part of the saved tree; None without changes.

        A patch has a limited size. If its field `more` is true, another one follows at once.
        """
        seen = seen if 0 <= seen <= self._last else 0
        if seen == self._last:
            return None
        changed = [*takewhile(lambda part: part[1][0] > seen, reversed(self._parts.items()))][::-1]
        parts = [part for part, _ in changed[:_PATCH]]
        calls = {node: list(self._tree.calls[node]) for kind, node in parts if kind == "calls"}
        patch = {"more": len(changed) > _PATCH, **calls_to_json(calls)}
        patch["nodes"] = [self._tree[node].to_json() for kind, node in parts if kind == "node"]
        if seen == 0:
            patch["root"] = self._tree.state(self._tree.root).model_dump(mode="json")
        if ("links", 0) in parts:
            patch["links"] = [link_to_json(*link) for link in self._tree.links()]
        return changed[:_PATCH][-1][1][0], patch


class Run(Progress):
    """A search that runs or has run."""

    def __init__(self, name: str, question: str) -> None:
        super().__init__()
        self.id = secrets.token_hex(8)
        self.thoughts = 0
        """Number of thoughts, once the search has ended."""
        self.revisions: Revisions | None = None
        """The revisions of its tree; None before the search begins."""
        self.solution: Solution | None = None
        """Set this when the search has ended."""
        self.ended: dict[str, Any] | None = None
        """The result, as in a saved run; None while it runs."""
        self._about = {"id": self.id, "name": name, "question": question[:300], "state": "running", "line": ""}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stopping = False

    def watch(self, session: SearchSession) -> None:
        if self._loop is None:
            self._loop, self.revisions = asyncio.get_running_loop(), Revisions(session.tree)
        super().watch(session)
        if self._stopping and session.stopped is None:  # it was stopped before it began
            session.stop(STOPPED)

    def stop(self) -> None:
        """End the search with its best answer so far, from any thread; one that has not begun, when it begins."""
        self._stopping = True
        if (session := self.session) is not None and self._loop is not None:
            with suppress(RuntimeError):  # the loop has ended
                self._loop.call_soon_threadsafe(session.stop, STOPPED)

    @property
    def status(self) -> dict[str, str]:
        """The row of the list, which also is the status line of the search's page."""
        return self._about if self.session is None else {**self._about, "line": self.line}

    def end(self, error: BaseException | None) -> None:
        """Keep the tree and the result, and nothing else of the search."""
        self.running = False
        if (solution := self.solution) is not None:
            sure = "" if solution.certainty is None else f"{solution.certainty:.0%} sure"
            self.leading = shown_answer(solution.answer or ""), solution.verdict if solution.solved else sure
            state, result = solution.stopped or "ended", solution.result()
        elif isinstance(error, Exception):
            state, result = "failed", {"error": str(error)}
        else:
            state, result = "cancelled", {"stopped": "cancelled"}
        self.thoughts = 0 if self.session is None else len(self.session.tree) - 1
        self._about = self.status | {"state": state}
        self.session = self.solution = None
        self.ended = result


class Runs:
    """The searches that run, and the last ones that have run, by id."""

    def __init__(self) -> None:
        self._runs: dict[str, Run] = {}
        self._votes = False

    def __getitem__(self, run: str) -> Run:
        """Return a search. Raises KeyError if it is not known any more."""
        return self._runs[run]

    def follow(self) -> None:
        """Compute leading answers from now on."""
        self._votes = True
        for run in self._runs.copy().values():
            run.votes = True

    @property
    def statuses(self) -> list[dict[str, str]]:
        """The status of each search, the last one first."""
        return [run.status for run in reversed(self._runs.copy().values())]

    @contextmanager
    def run(self, name: str, question: str) -> Iterator[Run]:
        """Add a search, which ends with this context."""
        run = Run(name, question)
        run.votes = self._votes
        self._runs[run.id] = run
        error: BaseException | None = None
        try:
            yield run
        except BaseException as raised:
            error = raised
            raise
        finally:
            run.end(error)
            self._forget()

    def _forget(self) -> None:
        """Remove the first ended searches beyond the limits."""
        thoughts = 0
        for number, run in enumerate([run for run in reversed(self._runs.values()) if run.ended is not None]):
            thoughts += run.thoughts
            if number >= _ENDED or (number and thoughts > _THOUGHTS):
                del self._runs[run.id]
