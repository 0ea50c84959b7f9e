"""Whether drafting pays, by the clock: what is expected may be wrong in ways that only time tells.

Steps with drafts and steps without are tried in turns; the faster way is kept, and the other tried again now and then.
The first trial is against the measured cost of a plain forward, so that what clearly pays is never left out.
"""

from __future__ import annotations

from dataclasses import dataclass

_TRIAL = 6
"""Steps of a way that is being tried."""
_BLOCKS = 60, 960
"""Steps of the faster way before the other is tried again: twice as many each time that it has won again."""
_FADES = 0.97
"""Older steps of a way count less."""
_INTERRUPTED = 4.0
"""A step counts as at most so many times as long as usual: it was interrupted by something else, a long prompt say."""


@dataclass
class _Way:
    steps: float = 0.0
    tokens: float = 0.0
    seconds: float = 0.0


class Trial:
    """Tell it what every step brought and took; it says whether to draft in the next."""

    def __init__(self, plain: float) -> None:
        """`plain`: seconds that a step without drafts, one token a branch, is thought to take."""
        self.drafts = True
        self._ways = {True: _Way(), False: _Way(1.0, 1.0, plain)}
        self._left = _TRIAL
        self._block = _BLOCKS[0]
        self._won: bool | None = None
        self._trying = True
        self._changed = True

    def step(self, tokens: float, seconds: float) -> None:
        """A step of the present way brought so many tokens a branch. The first one after a change counts for nothing:
        the draft catches up with what it has not seen."""
        self._changed, changed = False, self._changed
        if changed:
            return
        way = self._ways[self.drafts]
        if way.steps:
            seconds = min(seconds, _INTERRUPTED * way.seconds / way.steps)
        way.steps = way.steps * _FADES + 1
        way.tokens = way.tokens * _FADES + tokens
        way.seconds = way.seconds * _FADES + seconds
        self._left -= 1
        if self._left:
            return
        if not self._trying:
            self._change(not self.drafts)
            self._left, self._trying = _TRIAL, True
            return
        drafting, plain = self._ways[True], self._ways[False]
        self._change(drafting.tokens * plain.seconds > plain.tokens * drafting.seconds)  # tokens a second
        self._block = min(2 * self._block, _BLOCKS[1]) if self.drafts == self._won else _BLOCKS[0]
        self._left, self._trying, self._won = self._block, False, self.drafts

    def _change(self, drafts: bool) -> None:
        self._changed = drafts != self.drafts
        self.drafts = drafts
