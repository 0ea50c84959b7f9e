"""Drafters: they guess the next tokens of a text cheaply, and the target model verifies them.

A drafter never changes the output, only the speed.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from tot.decoders.drafting.latency_model import LatencyModel, latency_model
from tot.decoders.drafting.planner import SpeculationPlanner
from tot.decoders.engine.runner import Runner
from tot.decoders.engine.sampling import Draw
from tot.decoders.request import Purpose


@dataclass(frozen=True, slots=True)
class DraftContext:
    """A text to draft for."""

    key: int
    """Identifies the text while it grows."""
    prompt: Sequence[int]
    """The tokens of the prompt."""
    tokens: Sequence[int]
    """All tokens: the prompt and the tokens drawn."""
    draws: Sequence[Draw]
    """How the target will draw each of the next tokens; the draft is at most this deep."""
    widths: Sequence[int]
    """k_config: number of candidates at each position, per candidate of the position before."""
    weigh: bool = False
    """Whether the draft must include the probabilities that candidates are drawn with."""
    purpose: Purpose = "generate"


@dataclass(slots=True)
class Draft:
    """A tree of tokens. A node comes after its parent in the lists; -1 is the end of the text."""

    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    kinds: list[Hashable] = field(default_factory=list)
    """By node: the kind of the token, for which acceptance statistics are kept."""
    chances: list[float] = field(default_factory=list)
    """By node: the expected probability that all tokens up to it are accepted. 1 without a planner."""
    levels: dict[int, Hashable] = field(default_factory=dict)
    """By node whose children a model drafted: the kind of that forward. It succeeds if a child is accepted."""
    weights: dict[int, np.ndarray[Any, np.dtype[np.float64]]] = field(default_factory=dict)
    """By node (-1 for the text's end): the probabilities that its children were drawn with, (vocab of the target,)."""
    probes: list[list[int]] = field(default_factory=list)
    """Token sequences to feed after the text's end, beside the tree. The target draws a token after each; probes are
    never accepted. The longest come last, and are left out at the end of the model's context."""

    def add(
        self, token: int, parent: int, kind: Hashable = None, planner: SpeculationPlanner | None = None
    ) -> int | None:
        """Add a token after `parent`. Returns the new node, or None if the planner rejects it."""
        chance = 1.0
        if planner is not None:
            chance = planner.statistics.chance(kind) * (1.0 if parent < 0 else self.chances[parent])
            if not planner.admit(chance):
                return None
        self.tokens.append(token)
        self.parents.append(parent)
        self.kinds.append(kind)
        self.chances.append(chance)
        return len(self.tokens) - 1

    def children(self, node: int) -> list[int]:
        return [child for child, parent in enumerate(self.parents) if parent == node]

    def child(self, node: int, token: int) -> int | None:
        """Return the child of a node with a token, or None."""
        return next((child for child in self.children(node) if self.tokens[child] == token), None)

    def path(self, node: int) -> list[int]:
        """Return the nodes from the text's end to `node`, inclusive."""
        path = []
        while node >= 0:
            path.append(node)
            node = self.parents[node]
        return path[::-1]

    def leaves(self) -> list[int]:
        """Return the nodes without children, depth first."""
        inner = set(self.parents)
        return sorted((node for node in range(len(self.tokens)) if node not in inner), key=self.path)


class Verified(NamedTuple):
    """The result of verifying a draft."""

    context: DraftContext
    """The text before verification."""
    draft: Draft
    drawn: Mapping[int, int]
    """By node (-1 for the text's end): the token that the target drew after it."""
    probed: Sequence[int]
    """The tokens that the target drew after the draft's first probes."""
    accepted: int
    """Number of draft tokens that are now part of the text; one more token was drawn after them."""
    tokens: Sequence[int]
    """The tokens by which the text grew."""


class Drafter(ABC):
    """Guesses the next tokens of texts."""

    runner: Runner | None = None
    """The runner of its model, if it has one."""

    def latency(self, context: float) -> LatencyModel | None:
        """Return the seconds of its forwards after `context` tokens; None if drafting costs nothing."""
        return None if self.runner is None else latency_model(self.runner).at(context)

    @abstractmethod
    def draft(self, contexts: Sequence[DraftContext], planner: SpeculationPlanner | None = None) -> list[Draft]:
        """Return a draft for each text, which may be empty. A planner limits drafts to tokens worth verifying."""

    def observe(self, verified: Verified) -> None:  # noqa: B027
        """Learn from the verification of a draft, whichever drafter made it."""

    def end(self, key: int) -> None:  # noqa: B027
        """Free the state of a text that will not be continued."""
