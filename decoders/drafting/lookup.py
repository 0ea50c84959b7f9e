"""Drafts that ask no model: what followed the text's end where it was seen before, in any text of an engine.

NgramIndex is a dictionary from every n-gram to its latest end: adding a token and looking one up take microseconds,
whatever the size of the texts.
"""

from __future__ import annotations

from collections.abc import Sequence

from tot.decoders.drafting.drafters import Context, Draft, Drafter
from tot.decoders.drafting.planner import SpeculationPlanner

_LOOKUP_DEPTH = 3
"""From here on, tokens that were looked up are accepted about as often, one after the other."""


class NgramIndex:
    """Texts that grow token by token, and what followed each n-gram in them (2 <= n <= `longest`).

    At most about `capacity` tokens are kept: the texts begun first are forgotten first, and with them the n-grams that
    they were the last to continue.
    """

    def __init__(self, longest: int = 8, shortest: int = 2, capacity: int = 200_000) -> None:
        self.longest = longest
        self.shortest = shortest
        self.capacity = capacity
        self._texts: dict[int, list[int]] = {}
        self._ends: dict[tuple[int, ...], tuple[int, int]] = {}
        """The latest place where an n-gram ended and something followed: (text, position after it)."""
        self._kept = 0
        self._next = 0

    def begin(self) -> int:
        """A new text's number."""
        self._next += 1
        self._texts[self._next] = []
        return self._next

    def __contains__(self, text: int) -> bool:
        return text in self._texts

    def extend(self, text: int, tokens: Sequence[int]) -> None:
        """Append tokens to a text; to one that was forgotten, nothing."""
        known = self._texts.get(text)
        if known is None:
            return
        for token in tokens:
            end = len(known)  # what ends here has something after it from now on
            for n in range(self.shortest, min(self.longest, end) + 1):
                self._ends[tuple(known[end - n :])] = (text, end)
            known.append(token)
        self._kept += len(tokens)
        while self._kept > self.capacity and len(self._texts) > 1:
            self._forget(next(iter(self._texts)))

    def follow(self, tail: Sequence[int], count: int) -> tuple[int, list[int]]:
        """The length of the longest known end of `tail`, and up to `count` tokens that followed it the latest time that
        something did."""
        tail = list(tail[-self.longest :])
        for n in range(len(tail), self.shortest - 1, -1):
            text, end = self._ends.get(tuple(tail[len(tail) - n :]), (0, 0))
            if text:
                return n, self._texts[text][end : end + count]
        return 0, []

    def _forget(self, text: int) -> None:
        tokens = self._texts.pop(text)
        self._kept -= len(tokens)
        for end in range(1, len(tokens) + 1):
            for n in range(self.shortest, min(self.longest, end) + 1):
                gram = tuple(tokens[end - n : end])
                if self._ends.get(gram, (0, 0))[0] == text:
                    del self._ends[gram]


class LookupDrafter(Drafter):
    """Drafts what followed the text's last tokens when they were last seen, in any text of this engine so far.

    Prompt lookup (Saxena, 2023) over sibling and ancestor branches too: they are prompts and texts like any other.
    """

    def __init__(self) -> None:
        self.index = NgramIndex()
        self._texts: dict[int, tuple[int, int]] = {}
        """By key: the number in the index, and how many tokens it has of the text."""
        self._prompts: dict[tuple[int, ...], int] = {}

    def draft(self, contexts: Sequence[Context], planner: SpeculationPlanner | None = None) -> list[Draft]:
        for context in contexts:
            self._learn(context)
        drafts = []
        for context in contexts:
            draft, node = Draft(), -1
            matched, tokens = self.index.follow(context.tokens, len(context.widths))
            for depth, token in enumerate(tokens):
                added = draft.add(token, node, ("lookup", matched, min(depth, _LOOKUP_DEPTH)), planner)
                if added is None:
                    break
                node = added
            drafts.append(draft)
        return drafts

    def _learn(self, context: Context) -> None:
        if context.key not in self._texts:
            prompt = tuple(context.prompt)
            if self._prompts.get(prompt, 0) not in self.index:
                self._prompts = {known: text for known, text in self._prompts.items() if text in self.index}
                self._prompts[prompt] = self.index.begin()
                self.index.extend(self._prompts[prompt], prompt)
            # A text begins with the prompt's end, so that n-grams span the two.
            self._texts[context.key] = self.index.begin(), max(0, len(prompt) - self.index.longest)
        text, known = self._texts[context.key]
        self.index.extend(text, context.tokens[known:])
        self._texts[context.key] = text, len(context.tokens)

    def end(self, key: int) -> None:
        self._texts.pop(key, None)
