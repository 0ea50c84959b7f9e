"""Jacobi decoding: the target guesses its own next n tokens and corrects all of them at once, until they stay.

CLLM (Kou et al., 2024), Algorithm 3: a window of n tokens after each text, of which a step keeps what the target draws
as it was guessed, and one token more; what it drew after wrong tokens is the next guess. Keys and values of kept tokens
stay, and the window shrinks until all of it is fixed. A consistency LLM is decoded the same way; it only guesses
better. Seeded noise makes the fixed point the very text of `ar`, at any temperature.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

from tot.decoders.drafting.drafters import Draft, DraftContext, Drafter, Verified
from tot.decoders.drafting.planner import SpeculationPlanner

_PLACES = 8
"""Windows are learned about place by place; from here on, places are alike."""


@dataclass(slots=True)
class _Window:
    tokens: list[int] = field(default_factory=list)
    stayed: list[bool] = field(default_factory=list)
    """Which of them the last step drew as they were."""


class JacobiDrafter(Drafter):
    """The windows of all texts: drafts that are the target's own guesses."""

    def __init__(self, n: int) -> None:
        self._n = n
        self._windows: dict[int, _Window] = {}

    def draft(self, contexts: Sequence[DraftContext], planner: SpeculationPlanner | None = None) -> list[Draft]:
        return [self._chain(context, planner) for context in contexts]

    def _chain(self, context: DraftContext, planner: SpeculationPlanner | None) -> Draft:
        window, draft = self._windows.setdefault(context.key, _Window()), Draft()
        if not window.tokens:  # a new one holds tokens of the prompt, by chance
            window.tokens = random.Random(len(context.tokens)).choices(context.prompt, k=self._n)
            window.stayed = [False] * self._n
        for place, token in enumerate(window.tokens[: len(context.widths)]):
            kind = ("jacobi", min(place, _PLACES), window.stayed[place])
            if draft.add(token, place - 1, kind, planner) is None:
                break
        return draft

    def observe(self, verified: Verified) -> None:
        """What was drawn after the first wrong token and those behind it is the next guess."""
        window = self._windows.get(verified.context.key)
        if window is None:  # nothing has been drafted for it yet
            return
        kept = verified.accepted
        drawn = [verified.drawn[node] for node in range(kept, len(verified.draft.tokens))]
        before, old = window.tokens[kept + 1 :], window.stayed[kept + 1 :]
        window.stayed = [*(a == b for a, b in zip(drawn, before, strict=False)), *old[len(drawn) :]]
        window.tokens = [*drawn[: len(before)], *before[len(drawn) :]]

    def end(self, key: int) -> None:
        self._windows.pop(key, None)
