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
from tot.decoders.drafting.planner import AcceptanceStatistics, SpeculationPlanner

LONGEST = 6
"""Maximum number of tokens of a match."""
_PROMPTS = 16
"""Number of latest prompts that a new prompt is compared with."""
_ENTRIES = 2**20
"""Number of n-grams that an index holds: 8 MB."""
_MULTIPLIER, _MASK = 0x9E3779B97F4A7C15, 2**64 - 1
_BITS = 24
"""Bits of an entry for its token and streak; the others identify its n-gram."""
_LOW = 2**_BITS - 1


class Guess(NamedTuple):
    """The token that followed the latest occurrence of a text's last tokens."""

    token: int
    matched: int
    """Number of last tokens that are the same there."""
    streak: int
    """How often the token followed in a row: 1 at first, 0 after another token, at most 3."""

    @property
    def kind(self) -> Hashable:
        return "lookup", self.matched, self.streak


class NgramIndex:
    """The token that last followed each n-gram (1 <= n <= `LONGEST`), in a hash table whose old entries are replaced.

    An entry has the upper bits of the n-gram's hash, the token and its streak; 0 is empty.
    """

    def __init__(self, entries: int = _ENTRIES) -> None:
        self._table = np.zeros(entries, np.uint64).data
        self._entries = entries

    def extend(self, tokens: Sequence[int], start: int) -> None:
        """Add the n-grams of a text that precede its tokens from `start` on."""
        table, entries = self._table, self._entries
        for at in range(max(start, 1), len(tokens)):
            gram, token = 0, tokens[at]
            for before in range(at - 1, max(at - LONGEST, 0) - 1, -1):
                gram = (gram + tokens[before] + 1) * _MULTIPLIER & _MASK
                place, tag = gram % entries, gram >> _BITS << _BITS
                entry = table[place]
                streak = 1
                if entry >> _BITS << _BITS == tag:
                    streak = min((entry & 3) + 1, 3) if (entry & _LOW) >> 2 == token else 0
                table[place] = tag | token << 2 | streak

    def guess(self, tail: Sequence[int]) -> Guess | None:
        """Return the token after the latest occurrence of the longest known suffix of `tail`, or None."""
        gram, guess = 0, None
        for length, token in enumerate(reversed(tail[-LONGEST:]), 1):
            gram = (gram + token + 1) * _MULTIPLIER & _MASK
            entry = self._table[gram % self._entries]
            if entry and entry >> _BITS == gram >> _BITS:
                guess = Guess((entry & _LOW) >> 2, length, entry & 3)
        return guess


class LookupDrafter(Drafter):
    """Drafts the tokens that followed the latest occurrence of the text's last tokens, in any text of this engine."""

    def __init__(self) -> None:
        self.index = NgramIndex()
        self._indexed: dict[int, int] = {}
        """By key: the number of tokens of the text that are indexed."""
        self._prompts: deque[np.ndarray[Any, np.dtype[np.int32]]] = deque(maxlen=_PROMPTS)
        """The latest prompts that began with something new."""
        self._guesses: dict[int, tuple[Guess, AcceptanceStatistics]] = {}
        """By key: the guess for the next token that has not been judged."""

    def draft(self, contexts: Sequence[DraftContext], planner: SpeculationPlanner | None = None) -> list[Draft]:
        for context in contexts:
            if context.key not in self._indexed:
                self._indexed[context.key] = self._known(context.prompt)
            self.index.extend(context.tokens, self._indexed[context.key])
            self._indexed[context.key] = len(context.tokens)
        return [self._draft(context, planner) for context in contexts]

    def _draft(self, context: DraftContext, planner: SpeculationPlanner | None) -> Draft:
        draft, tail = Draft(), list(context.tokens[-LONGEST:])
        guess = self.index.guess(tail)
        if guess is not None and planner is not None:
            self._guesses[context.key] = guess, planner.statistics
        while guess is not None and len(draft.tokens) < len(context.widths):
            if draft.add(guess.token, len(draft.tokens) - 1, guess.kind, planner) is None:
                break
            tail.append(guess.token)
            guess = self.index.guess(tail)
        return draft

    def observe(self, verified: Verified) -> None:
        """Judge the guess for the text, unless it was drafted: then it was judged as a draft."""
        guess, statistics = self._guesses.pop(verified.context.key, (None, None))
        if guess is not None and statistics is not None and guess.kind not in verified.draft.kinds[:1]:
            statistics.learn(guess.kind, verified.tokens[0] == guess.token)

    def _known(self, prompt: Sequence[int]) -> int:
        """Return how many tokens of a prompt are indexed as the beginning of another, and remember the prompt."""
        tokens, known = np.array(prompt, np.int32), 0
        for other in self._prompts:
            size = min(len(other), len(tokens))
            differs = other[:size] != tokens[:size]
            known = max(known, int(differs.argmax()) if differs.any() else size)
        if known < len(tokens):
            self._prompts.append(tokens)
        return known

    def end(self, key: int) -> None:
        self._indexed.pop(key, None)
        self._guesses.pop(key, None)
