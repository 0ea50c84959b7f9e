"""Prompt-lookup drafts: the tokens that followed an earlier occurrence of a text's end, in any text of an engine.

Prompt lookup (Saxena, 2023) that also covers sibling and ancestor branches, since these are texts of the engine. Each
step shows whether the token looked up before it was right, so the chance of a draft is known without verifying any.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

import numpy as np

from tot.decoders.drafting.drafters import Draft, DraftContext, Drafter, Verified
from tot.decoders.drafting.ngram_index import NgramIndex, Text
from tot.decoders.drafting.planner import AcceptanceStatistics, SpeculationPlanner

_PROMPTS = 16
"""Number of latest prompts that a new prompt is compared with."""


class _Prompt(NamedTuple):
    tokens: np.ndarray[Any, np.dtype[np.int32]]
    first: int
    """Value of `NgramIndex.written` when the oldest of its tokens was indexed."""


class _Guess(NamedTuple):
    """The token looked up for the next position of a text."""

    token: int
    kind: Hashable
    statistics: AcceptanceStatistics


class LookupDrafter(Drafter):
    """Drafts the tokens that followed the latest occurrence of the text's last tokens, in any text of this engine."""

    judges_itself = True

    def __init__(self) -> None:
        self.index = NgramIndex()
        self._texts: dict[int, tuple[Text, int]] = {}
        """By key: the text in the index, and the number of its tokens that are indexed."""
        self._prompts: deque[_Prompt] = deque(maxlen=_PROMPTS)
        """Indexed prompts, none of which begins another."""
        self._guesses: dict[int, _Guess] = {}

    def draft(self, contexts: Sequence[DraftContext], planner: SpeculationPlanner | None = None) -> list[Draft]:
        for context in contexts:
            self._learn(context)
        drafts = []
        for context in contexts:
            draft, node = Draft(), -1
            text, _ = self._texts[context.key]
            matched, tokens = self.index.follow(context.tokens, max(1, len(context.widths)), text)
            if tokens and planner is not None:
                self._guesses[context.key] = _Guess(tokens[0], self._kind(matched), planner.statistics)
            for depth, token in enumerate(tokens[: len(context.widths)]):
                added = draft.add(token, node, self._kind(matched + depth), planner)
                if added is None:
                    break
                node = added
            drafts.append(draft)
        return drafts

    def _kind(self, matched: int) -> Hashable:
        """Return the kind of a token after a match of this length. Accepted tokens make the match longer."""
        return "lookup", min(matched, self.index.longest)

    def observe(self, verified: Verified) -> None:
        """Judge the token looked up for the text, unless it was drafted: then it was judged as a draft."""
        guess = self._guesses.pop(verified.context.key, None)
        if guess is not None and guess.kind not in verified.draft.kinds[:1]:
            guess.statistics.learn(guess.kind, verified.tokens[0] == guess.token)

    def _learn(self, context: DraftContext) -> None:
        """Index the new tokens of a text."""
        if context.key not in self._texts:
            known = self._known(context.prompt)
            # A text begins with the end of the part that is known, so that n-grams can span both.
            self._texts[context.key] = Text(written=self.index.written), max(0, known - self.index.longest)
        text, indexed = self._texts[context.key]
        self.index.extend(text, context.tokens[indexed:])
        self._texts[context.key] = text, len(context.tokens)

    def _known(self, prompt: Sequence[int]) -> int:
        """Return how many tokens of a prompt are indexed as the beginning of another, and remember the prompt."""
        tokens = np.array(prompt, np.int32)
        oldest = self.index.written - self.index.capacity
        best, first, known = None, self.index.written, 0
        for other in self._prompts:
            size = min(len(other.tokens), len(tokens))
            differs = other.tokens[:size] != tokens[:size]
            common = int(differs.argmax()) if differs.any() else size
            if common > known and other.first >= oldest:
                best, first, known = other, other.first, common
        if best is None or known < len(tokens):
            if best is not None and known == len(best.tokens):
                self._prompts = deque((other for other in self._prompts if other is not best), _PROMPTS)
            self._prompts.append(_Prompt(tokens, first))
        return known

    def end(self, key: int) -> None:
        self._texts.pop(key, None)
        self._guesses.pop(key, None)
