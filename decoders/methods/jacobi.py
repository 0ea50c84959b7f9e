"""Jacobi decoding: the target guesses its own next n tokens and corrects all of them at once, until none changes.

CLLM (Kou et al., 2024), Algorithm 3: each text is followed by a window of n guessed tokens. A step accepts the guesses
up to the first wrong one, and one more token. The tokens drawn after the wrong guess are the next guesses. Keys and
values of accepted tokens stay, and the window shrinks until all of it is fixed. A consistency LLM is decoded the same
way, but guesses better. With seeded noise, the fixed point is exactly the text of `ar`, at any temperature.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Annotated

from pydantic import Field

from tot.decoders.drafting.drafters import Draft, DraftContext, Drafter, Verified
from tot.decoders.drafting.planner import SpeculationPlanner
from tot.decoders.engine.engine import Engine
from tot.decoders.methods.method import Method, MethodOptions, OpenedMethod
from tot.decoders.methods.speculative import SpeculativeConfig, speculate

_POSITIONS = 8
"""Statistics are kept per position of a window; positions from this one on share them."""


@dataclass(slots=True)
class _Window:
    """The guesses after one text."""

    tokens: list[int] = field(default_factory=list)
    unchanged: list[bool] = field(default_factory=list)
    """By token: whether the last step drew it unchanged."""


class JacobiDrafter(Drafter):
    """Drafts the windows of all texts, which are the target's own guesses."""

    def __init__(self, n: int) -> None:
        self._n = n
        self._windows: dict[int, _Window] = {}

    def draft(self, contexts: Sequence[DraftContext], planner: SpeculationPlanner | None = None) -> list[Draft]:
        return [self._chain(context, planner) for context in contexts]

    def _chain(self, context: DraftContext, planner: SpeculationPlanner | None) -> Draft:
        window, draft = self._windows.setdefault(context.key, _Window()), Draft()
        if not window.tokens:  # a new window holds random tokens of the prompt
            window.tokens = random.Random(len(context.tokens)).choices(context.prompt, k=self._n)
            window.unchanged = [False] * self._n
        for position, token in enumerate(window.tokens[: len(context.widths)]):
            kind = ("jacobi", min(position, _POSITIONS), window.unchanged[position])
            if draft.add(token, position - 1, kind, planner) is None:
                break
        return draft

    def observe(self, verified: Verified) -> None:
        """Use the tokens drawn after the first wrong guess, and after the guesses behind it, as the next guesses."""
        window = self._windows.get(verified.context.key)
        if window is None:  # no draft so far
            return
        grown = len(verified.tokens)  # the accepted guesses, the token after them, and tokens that a constraint forces
        nodes = (node for node in range(grown - 1, len(verified.draft.tokens)) if node in verified.drawn)
        drawn = [verified.drawn[node] for node in nodes]
        before, old = window.tokens[grown:], window.unchanged[grown:]
        window.unchanged = [*(a == b for a, b in zip(drawn, before, strict=False)), *old[len(drawn) :]]
        window.tokens = [*drawn[: len(before)], *before[len(drawn) :]]

    def end(self, key: int) -> None:
        self._windows.pop(key, None)


class JacobiOptions(MethodOptions):
    """Jacobi decoding (Santilli et al., 2023): correct n guessed tokens at once. Fast with a consistency LLM."""

    n: Annotated[int, Field(ge=1, le=128)] = 16
    """Tokens of a window."""
    adapt: bool = True
    """Feed only the part of a window that pays, by the measured latency and acceptance."""
    trajectory: bool = False
    """Keep the guesses of every step in `Completion.trajectory`."""


def _open(engine: Engine, options: JacobiOptions, stack: ExitStack) -> OpenedMethod:
    config = SpeculativeConfig((1,) * options.n, adapt=options.adapt, trajectory=options.trajectory)
    return speculate(engine, JacobiDrafter(options.n), config)


METHOD = Method(_open, JacobiOptions)
