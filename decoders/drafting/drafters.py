"""What a drafter is: what a text may go on with, guessed cheaply, for a target model to verify.

A drafter never decides what comes out, only how fast.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from torch import Tensor

from tot.decoders.drafting.planner import SpeculationPlanner
from tot.decoders.engine.runner import Runner
from tot.decoders.engine.sampling import Draw
from tot.decoders.request import Purpose


@dataclass(frozen=True, slots=True)
class DraftContext:
    """A text to be continued."""

    key: int
    """The same for one text as it grows."""
    prompt: Sequence[int]
    """What the text began with."""
    tokens: Sequence[int]
    """All of it, prompt and what was drawn."""
    draws: Sequence[Draw]
    """How the target will draw each of the next tokens: as many as may be drafted."""
    widths: Sequence[int]
    """k_config: how many candidates at each of these positions, after each candidate before it."""
    weigh: bool = False
    """The probabilities that candidates are drawn with are wanted too."""
    purpose: Purpose = "generate"


@dataclass(slots=True)
class Draft:
    """A tree of tokens; a node stands after its parent in the lists, -1 being the text's end."""

    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    kinds: list[Hashable] = field(default_factory=list)
    """By node: what is learned from its being accepted or not is of use for others of this kind."""
    chances: list[float] = field(default_factory=list)
    """By node: that all up to it is accepted, where that is known."""
    levels: dict[int, Hashable] = field(default_factory=dict)
    """By node whose children a model drafted: the kind of that forward, which brought something if one is accepted."""
    weights: dict[int, Tensor] = field(default_factory=dict)
    """By node (-1 for the text's end): the probabilities (vocab,) that its children were drawn with, vocab being the
    target's."""
    probes: list[list[int]] = field(default_factory=list)
    """Tokens to be fed after the text's end beside the tree, for what the target draws after the last of them: nothing
    of them is ever accepted. The longest come last, and are left out where the model's context ends."""

    def add(
        self, token: int, parent: int, kind: Hashable = None, planner: SpeculationPlanner | None = None
    ) -> int | None:
        """The new node; None where it does not pay by the plan."""
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

    def path(self, node: int) -> list[int]:
        """The nodes from the text's end to `node`, which is the last."""
        path = []
        while node >= 0:
            path.append(node)
            node = self.parents[node]
        return path[::-1]

    def leaves(self) -> list[int]:
        """Nodes without children, depth first."""
        inner = set(self.parents)
        return sorted((node for node in range(len(self.tokens)) if node not in inner), key=self.path)


class Verified(NamedTuple):
    """What became of a draft."""

    context: DraftContext
    """The text as it was drafted for."""
    draft: Draft
    drawn: Mapping[int, int]
    """By node (-1 for the text's end): the token that the target drew after it."""
    probed: Sequence[int]
    """The tokens that it drew after the draft's first probes."""
    accepted: int
    """How many of the draft's tokens are now part of the text; one more token was drawn after them."""


class Drafter(ABC):
    runner: Runner | None = None
    """What runs its model, where it has one."""

    @abstractmethod
    def draft(self, contexts: Sequence[DraftContext], planner: SpeculationPlanner | None = None) -> list[Draft]:
        """A draft for each text, which may be empty. With a planner, what does not pay is left out."""

    def observe(self, verified: Verified) -> None:  # noqa: B027
        """Learn from what became of a draft, be it this drafter's or another's."""

    def end(self, key: int) -> None:  # noqa: B027
        """That text will not be continued."""


class DrafterChain(Drafter):
    """Asks one drafter, and for texts it has nothing for the next."""

    def __init__(self, drafters: Sequence[Drafter]) -> None:
        self._drafters = drafters
        self.runner = next((drafter.runner for drafter in drafters if drafter.runner is not None), None)

    def draft(self, contexts: Sequence[DraftContext], planner: SpeculationPlanner | None = None) -> list[Draft]:
        drafts = [Draft() for _ in contexts]
        for drafter in self._drafters:
            missing = [i for i, draft in enumerate(drafts) if not draft.tokens]
            for i, draft in zip(missing, drafter.draft([contexts[i] for i in missing], planner), strict=True):
                drafts[i] = draft
        return drafts

    def observe(self, verified: Verified) -> None:
        for drafter in self._drafters:
            drafter.observe(verified)

    def end(self, key: int) -> None:
        for drafter in self._drafters:
            drafter.end(key)
