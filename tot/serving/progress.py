"""Progress: the leading answer and the speed of a running search, for a status line or a page."""

from __future__ import annotations

import asyncio
import math
import time

from tot.decoders.errors import TaskError
from tot.report.terminal import brief
from tot.search.certainty import features
from tot.search.session import SearchSession, shown_answer
from tot.search.votes import cast

_PAUSE = 20
"""Minimum pause after a vote, in durations of the vote: votes take at most 5% of the time."""


class Progress:
    """Follows a search: pass `watch` to `solve`. Its attributes can be read from any thread."""

    def __init__(self) -> None:
        self.session: SearchSession | None = None
        """The search; None until it begins."""
        self.leading: tuple[str, str] | None = None
        """The answer that leads, and how sure it is, such as "83% sure"; None while there is no answer."""
        self.running = True
        self.votes = True
        """Whether `leading` is computed."""
        self._pause = 0.0
        self._next: asyncio.TimerHandle | None = None

    def watch(self, session: SearchSession) -> None:
        """Vote soon after a step of the search, in its event loop, at most once per pause."""
        self.session = session
        if self.votes and self._next is None:
            self._next = asyncio.get_running_loop().call_later(self._pause, self._vote, session)

    def _vote(self, session: SearchSession) -> None:
        began, self._next = time.monotonic(), None
        try:
            self.leading = leading(session)
        except TaskError:  # the search reports it if its own vote fails
            self.leading = None
        self._pause = _PAUSE * (time.monotonic() - began)

    @property
    def line(self) -> str:
        """Leading answer, level, thoughts, tokens/s, seconds and seconds left, as text; empty before the search."""
        if (session := self.session) is None:
            return ""
        tree, meter = session.tree, session.meter
        level, rate = max(node.depth for node in tree), meter.new_tokens / max(meter.seconds, 1e-9)
        line = f"level {level}, {len(tree) - 1} thoughts, {meter.new_tokens} tokens, {rate:.0f} tokens/s"
        line += f", {meter.seconds:.0f} s"
        if self.running and (left := meter.seconds_left) is not None:
            line += f", {left:.0f} s left"
        answer, note = self.leading or ("", "")
        return f"{brief(answer, 40)}{f' ({note})' * bool(note)} · {line}" if answer else line


def leading(session: SearchSession) -> tuple[str, str] | None:
    """Return the answer that a search would give now without further calls, and how sure it is; None without one."""
    search = session.search
    answered = [(node, answer) for node in session.candidates if (answer := search.answer_at(node)) is not None]
    if not answered:
        return None
    question, aggregate = session.tree.state(session.tree.root).question, search.options.aggregate
    ballots, winners = cast(search.checked, question, answered, aggregate == "majority")
    node, answer = answered[winners[0]]
    total = math.fsum(ballot.weight for ballot in ballots)
    if node is search.solved:
        note = session.task.verdict
    elif aggregate == "best" or len(ballots) == 1 or not total > 0:
        note = ""
    elif session.curve is not None:
        note = f"{session.curve.certainty(features(ballots)):.0%} sure"
    else:
        note = f"{math.fsum(ballots[i].weight for i in winners) / total:.0%} of votes"
    return shown_answer(answer), note
