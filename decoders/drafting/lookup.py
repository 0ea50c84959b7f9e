"""Drafts that ask no model: what followed the text's end where it was seen before, in any text of an engine.

NgramIndex holds a dictionary from the shortest n-grams to their latest end, and from each end to the one before. Adding
a token takes a microsecond and about 200 bytes; a lookup compares the ends from the latest on.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import NamedTuple

from tot.decoders.drafting.drafters import Draft, DraftContext, Drafter
from tot.decoders.drafting.planner import SpeculationPlanner

_LOOKUP_DEPTH = 3
"""From here on, tokens that were looked up are accepted about as often, one after the other."""


_BITS = 32
_POSITION = (1 << _BITS) - 1
"""A place is a text's number and, in so many bits, a position in it; so a token is at most as large."""
_MOST_ENDS = 512
"""Ends that a lookup compares: of an n-gram that is everywhere, those seen lately."""


class NgramIndex:
    """Texts that grow token by token, and what followed each n-gram in them (2 <= n <= `longest`).

    At most about `capacity` tokens are kept: the texts begun first are forgotten first, and with them the n-grams that
    they were the last to continue.
    """

    def __init__(self, longest: int = 8, shortest: int = 2, capacity: int = 200_000) -> None:
        self.longest = longest
        self.shortest = shortest
        self.capacity = capacity
        self._texts: dict[int, _Text] = {}
        self._ends: dict[int, int] = {}
        """By n-gram, in one number: the latest place where one of the shortest ended and something followed."""
        self._kept = 0
        self._next = 0

    def begin(self) -> int:
        """A new text's number."""
        self._next += 1
        self._texts[self._next] = _Text(array("q"), array("q"))
        return self._next

    def __contains__(self, text: int) -> bool:
        return text in self._texts

    def extend(self, text: int, tokens: Sequence[int]) -> None:
        """Append tokens to a text; to one that was forgotten, nothing."""
        known = self._texts.get(text)
        if known is None:
            return
        for token in tokens:
            end = len(known.tokens)  # what ends here has something after it from now on
            before = 0
            if end >= self.shortest:
                gram, place = _number(known.tokens[end - self.shortest : end]), text << _BITS | end
                before, self._ends[gram] = self._ends.get(gram, 0), place
            known.tokens.append(token)
            known.before.append(before)
        self._kept += len(tokens)
        while self._kept > self.capacity and len(self._texts) > 1:
            self._forget(next(iter(self._texts)))

    def follow(self, tail: Sequence[int], count: int) -> tuple[int, list[int]]:
        """The length of the longest known end of `tail`, and up to `count` tokens that followed it the latest time that
        something did."""
        wanted = list(tail[-self.longest :])
        wanted.reverse()
        if len(wanted) < self.shortest:
            return 0, []
        place = self._ends.get(_number(wanted[: self.shortest][::-1]), 0)
        best, found = 0, 0
        for _ in range(_MOST_ENDS):
            text, end = place >> _BITS, place & _POSITION
            if (known := self._texts.get(text)) is None:
                break
            same = self.shortest
            for token in wanted[same:]:
                if same == end or known.tokens[end - same - 1] != token:
                    break
                same += 1
            if same > best:
                best, found = same, place
            if best == len(wanted):
                break
            place = known.before[end]
        if not best:
            return 0, []
        end = found & _POSITION
        return best, self._texts[found >> _BITS].tokens[end : end + count].tolist()

    def _forget(self, text: int) -> None:
        known = self._texts.pop(text)
        self._kept -= len(known.tokens)
        for end in range(len(known.tokens) - 1, self.shortest - 1, -1):
            gram = _number(known.tokens[end - self.shortest : end])
            if self._ends.get(gram, 0) >> _BITS == text:
                if known.before[end] >> _BITS in self._texts or known.before[end] >> _BITS == text:
                    self._ends[gram] = known.before[end]
                else:
                    del self._ends[gram]


class _Text(NamedTuple):
    tokens: array[int]
    before: array[int]
    """By position: the place where the n-gram that ends there ended before; 0 where it is new."""


def _number(gram: Sequence[int]) -> int:
    number = 0
    for token in gram:
        number = number << _BITS | token
    return number


class LookupDrafter(Drafter):
    """Drafts what followed the text's last tokens when they were last seen, in any text of this engine so far.

    Prompt lookup (Saxena, 2023) over sibling and ancestor branches too: they are prompts and texts like any other.
    """

    def __init__(self) -> None:
        self.index = NgramIndex()
        self._texts: dict[int, tuple[int, int]] = {}
        """By key: the number in the index, and how many tokens it has of the text."""
        self._prompts: dict[tuple[int, ...], int] = {}

    def draft(self, contexts: Sequence[DraftContext], planner: SpeculationPlanner | None = None) -> list[Draft]:
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

    def _learn(self, context: DraftContext) -> None:
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
