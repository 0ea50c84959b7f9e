"""LevelDrafter: drafts of a model, level by level, for all texts at once.

The draft is drawn with the target's own noise, so it guesses the token that the target is most likely to draw.
"""

from __future__ import annotations

import math
import threading
from abc import abstractmethod
from collections.abc import Hashable, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np

from tot.decoders.drafting.drafters import Draft, DraftContext, Drafter
from tot.decoders.drafting.planner import SpeculationPlanner
from tot.decoders.engine.radix_cache import RadixCacheFullError
from tot.decoders.engine.sampling import candidates, distribution, read

Place = TypeVar("Place")
"""Where a draft model continues a text."""


class Tip(NamedTuple, Generic[Place]):
    """A node that a draft may be extended from."""

    context: int
    node: int
    place: Place


def level(context: DraftContext, depth: int) -> Hashable:
    """Return the kind of a draft model's forward at a depth; it succeeds if a token after it is accepted."""
    return "level", depth, round(context.draws[0].temperature, 1)


class LevelDrafter(Drafter, Generic[Place]):
    """Drafts with one forward per position for all texts. Subclasses compute the logits."""

    def __init__(self, vocabulary: int) -> None:
        self.vocabulary = vocabulary
        """Size of the target's logits; the draft's may be larger or smaller."""
        self._lock = threading.Lock()
        """Drafting may run in another thread (SEED's rounds), and decoders share a drafter."""

    @property
    def timed(self) -> bool:
        """Whether enough of its forwards were timed to trust their estimated cost."""
        return True

    @abstractmethod
    def _follow(self, contexts: Sequence[DraftContext]) -> list[tuple[int, Place]]:
        """Return (number of the text, place of its end) for each text that can be drafted for."""

    @abstractmethod
    def _logits(self, contexts: Sequence[DraftContext], frontier: Sequence[Tip[Place]], depth: int) -> Any:
        """Return the logits after each tip, (tips, vocabulary)."""

    @abstractmethod
    def _child(self, place: Place, token: int) -> Place:
        """Return the place of a token after a place."""

    @abstractmethod
    def _forget(self, key: int) -> None:
        """Free the state of a text."""

    def _free(self) -> None:
        """Free the places of the last draft."""

    def draft(self, contexts: Sequence[DraftContext], planner: SpeculationPlanner | None = None) -> list[Draft]:
        with self._lock:
            return self._draft(contexts, planner)

    def _draft(self, contexts: Sequence[DraftContext], planner: SpeculationPlanner | None) -> list[Draft]:
        drafts = [Draft() for _ in contexts]
        active = [i for i, context in enumerate(contexts) if context.widths]
        if not active:
            return drafts
        if planner is not None:
            kind = level(contexts[active[0]], 0)
            if not planner.deepen(kind, [1.0] * len(active), self.timed):
                return drafts
        try:
            frontier = [Tip(i, -1, place) for i, place in self._follow(contexts)]
            depth = 0
            while frontier:
                candidates_by_tip = self._candidates(contexts, frontier, depth, drafts, planner is not None)
                depth += 1
                deeper: list[Tip[Place]] = []
                for (i, node, place), (tokens, confidence) in zip(frontier, candidates_by_tip, strict=True):
                    temperature = round(contexts[i].draws[0].temperature, 1)
                    drafts[i].levels[node] = level(contexts[i], depth - 1)
                    for rank, token in enumerate(tokens):
                        child = drafts[i].add(token, node, ("model", temperature, rank, confidence), planner)
                        if child is None:
                            break  # rejection tests candidates in the order in which they were drawn
                        if depth < len(contexts[i].widths):
                            deeper.append(Tip(i, child, place))
                if planner is not None and deeper:
                    chances = [drafts[tip.context].chances[tip.node] for tip in deeper]
                    if not planner.deepen(level(contexts[deeper[0].context], depth), chances):
                        break
                frontier = [Tip(i, node, self._child(place, drafts[i].tokens[node])) for i, node, place in deeper]
        except RadixCacheFullError:  # return the draft so far
            pass
        finally:
            self._free()
        return drafts

    def _candidates(
        self,
        contexts: Sequence[DraftContext],
        frontier: Sequence[Tip[Place]],
        depth: int,
        drafts: Sequence[Draft],
        weigh: bool,
    ) -> list[tuple[list[int], int]]:
        """Return the candidates after each tip of the frontier, computed in one forward.

        With `weigh`, also return the draft's confidence in its top token, from 0 to 9; otherwise 0.
        """
        logits = self._logits(contexts, frontier, depth)
        draws = [contexts[tip.context].draws[depth] for tip in frontier]
        for tip, row, draw in zip(frontier, logits, draws, strict=True):
            if contexts[tip.context].weigh and draw.temperature > 0:
                missing = self.vocabulary - len(row)  # tokens that only the target has
                drafts[tip.context].weights[tip.node] = np.pad(distribution(row, draw), (0, missing))
        top_tokens: list[list[int]] = [[] for _ in frontier]
        widths = [contexts[tip.context].widths[depth] for tip in frontier]
        for width in sorted(set(widths)):
            same = [i for i, other in enumerate(widths) if other == width]
            for i, tokens in zip(same, candidates(logits[same], [draws[i] for i in same], width), strict=True):
                top_tokens[i] = tokens
        if not weigh:
            return [(tokens, 0) for tokens in top_tokens]
        best = read(logits, logits.argmax(-1).tolist())
        confidence = [0 if math.isnan(token.logprob) else int(9.99 * math.exp(token.logprob)) for token in best]
        return list(zip(top_tokens, confidence, strict=True))

    def end(self, key: int) -> None:
        with self._lock:
            self._forget(key)
