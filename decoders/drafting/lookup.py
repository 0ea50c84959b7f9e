"""Prompt-lookup drafts: the tokens that followed an earlier occurrence of a text's end, in any text of an engine.

Prompt lookup (Saxena, 2023) that also covers sibling and ancestor branches, since these are texts of the engine. The
chance of a token depends on the length of the match, and on how often the token followed it in a row: a cheap form of
the counts of SuffixDecoding (Oliaro et al., 2024, section 3). Each step shows whether the token looked up before it was
right, so the chance is known without verifying drafts.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

import numpy as np

from tot.decoders.drafting.drafters import Draft, DraftContext, Drafter, Verified
from tot.decoders.drafting.ngram_index import Guess, NgramIndex, Text
from tot.decoders.drafting.planner import AcceptanceStatistics, SpeculationPlanner

_PROMPTS = 16
"""Number of latest prompts that a new prompt is compared with."""


class _Prompt(NamedTuple):
    tokens: np.ndarray[Any, np.dtype[np.int32]]
    first: int
    """Value of `NgramIndex.written` when the oldest of its tokens was indexed."""


class _Unjudged(NamedTuple):
    """The guess for the next token of a text."""

    guess: Guess
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
        self._guesses: dict[int, _Unjudged] = {}

    def draft(self, contexts: Sequence[DraftContext], planner: SpeculationPlanner | None = None) -> list[Draft]:
        for context in contexts:
            self._learn(context)
        return [self._draft(context, planner) for context in contexts]

    def _draft(self, context: DraftContext, planner: SpeculationPlanner | None) -> Draft:
        draft, tail = Draft(), list(context.tokens[-self.index.longest :])
        guess = self.index.guess(tail)
        if guess is not None and planner is not None:
            self._guesses[context.key] = _Unjudged(guess, planner.statistics)
        while guess is not None and len(draft.tokens) < len(context.widths):
            if draft.add(guess.token, len(draft.tokens) - 1, _kind(guess), planner) is None:
                break
            tail.append(guess.token)
            guess = self.index.guess(tail)
        return draft

    def observe(self, verified: Verified) -> None:
        """Judge the guess for the text, unless it was drafted: then it was judged as a draft."""
        unjudged = self._guesses.pop(verified.context.key, None)
        if unjudged is not None and (kind := _kind(unjudged.guess)) not in verified.draft.kinds[:1]:
            unjudged.statistics.learn(kind, verified.tokens[0] == unjudged.guess.token)

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


def _kind(guess: Guess) -> Hashable:
    return "lookup", guess.matched, guess.streak
