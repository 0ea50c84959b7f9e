"""Live searches: what runs, with its leading answer and its speed, and the last searches that have ended."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from tot.decoders.errors import TaskError
from tot.report.terminal import brief
from tot.run import Run
from tot.serving.revisions import Revisions
from tot.solution import Solution
from tot.task.task import answer_text

_PAUSE = 100
"""Minimum pause after a vote, in durations of the vote: votes take at most 1% of the time."""
_ENDED = 20
"""Ended searches that are kept at most."""
_THOUGHTS = 20_000
"""Thoughts of ended searches that are kept at most; the last search is always kept."""
STOPPED = "stopped on the live page"


class LiveSearch:
    """A search that runs or has run: pass `watch` to `run_search`. Its attributes can be read from any thread."""

    def __init__(self, name: str = "", question: str = "", votes: bool = True) -> None:
        self.id = secrets.token_hex(8)
        self.votes = votes
        """Whether `leading` is computed."""
        self.run: Run | None = None
        """The search; None before it begins and after it has ended."""
        self.leading: tuple[str, str] | None = None
        """The answer that leads, and how sure it is, such as "83% sure"; None while there is no answer."""
        self.running = True
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
        self._pause = 0.0
        self._next: asyncio.TimerHandle | None = None

    def watch(self, run: Run) -> None:
        """Vote soon after a step of the search, in its event loop, at most once per pause."""
        if self._loop is None:
            self._loop, self.revisions = asyncio.get_running_loop(), Revisions(run.tree)
        self.run = run
        if self.votes and self._next is None:
            self._next = self._loop.call_later(self._pause, self._vote, run)
        if self._stopping and run.stopped is None:  # it was stopped before it began
            run.stop(STOPPED)

    def _vote(self, run: Run) -> None:
        began, self._next = time.monotonic(), None
        try:
            self.leading = leading(run)
        except TaskError:  # the search reports it if its own vote fails
            self.leading = None
        self._pause = _PAUSE * (time.monotonic() - began)

    def stop(self) -> None:
        """End the search with its best answer so far, from any thread; one that has not begun, when it begins."""
        self._stopping = True
        if (run := self.run) is not None and self._loop is not None:
            with suppress(RuntimeError):  # the loop has ended
                self._loop.call_soon_threadsafe(run.stop, STOPPED)

    @property
    def status(self) -> dict[str, str]:
        """The row of the list, which also is the status line of the search's page."""
        return self._about if self.run is None else {**self._about, "answer": self._leader(500), "line": self.line}

    @property
    def line(self) -> str:
        """Leading answer, level, thoughts, tokens/s, seconds and seconds left, as text; empty before the search."""
        if (run := self.run) is None:
            return ""
        tree, meter = run.tree, run.meter
        level, rate = max(node.depth for node in tree), meter.new_tokens / max(meter.seconds, 1e-9)
        line = f"level {level}, {len(tree) - 1} thoughts, {meter.new_tokens} tokens, {rate:.0f} tokens/s"
        line += f", {meter.seconds:.0f} s"
        if self.running and (left := meter.seconds_left) is not None:
            line += f", {left:.0f} s left"
        return f"{leader} · {line}" if (leader := self._leader(40)) else line

    def _leader(self, most: int) -> str:
        answer, note = self.leading or ("", "")
        return f"{brief(answer, most)}{f' ({note})' * bool(note)}" if answer else ""

    def end(self, error: BaseException | None) -> None:
        """Keep the tree and the result, and nothing else of the search."""
        self.running = False
        if (solution := self.solution) is not None:
            sure = "" if solution.certainty is None else f"{solution.certainty:.0%} sure"
            answer = "" if solution.answer is None else answer_text(solution.answer)
            self.leading = answer, solution.verdict if solution.solved else sure
            state, result = solution.stopped or "ended", solution.result()
        elif isinstance(error, Exception):
            state, result = "failed", {"error": str(error)}
        else:
            state, result = "cancelled", {"stopped": "cancelled"}
        self.thoughts = 0 if self.run is None else len(self.run.tree) - 1
        self._about = self.status | {"state": state}
        self.run = self.solution = None
        self.ended = result


def leading(run: Run) -> tuple[str, str] | None:
    """Return the answer that leads, and how sure it is; None without an answer."""
    if (leader := run.answers.leading()) is None:
        return None
    if run.search.solved is not None:
        return leader.answer, run.task.verdict
    if leader.certainty is not None:
        return leader.answer, f"{leader.certainty:.0%} sure"
    return leader.answer, "" if leader.share is None else f"{leader.share:.0%} of votes"


class LiveSearches:
    """The searches that run, and the last ones that have run, by id."""

    def __init__(self) -> None:
        self._runs: dict[str, LiveSearch] = {}
        self._votes = False

    def __getitem__(self, run: str) -> LiveSearch:
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
    def run(self, name: str, question: str) -> Iterator[LiveSearch]:
        """Add a search, which ends with this context."""
        run = LiveSearch(name, question, self._votes)
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
