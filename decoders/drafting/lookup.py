"""Prompt-lookup drafts: the tokens that followed an earlier occurrence of a text's end, in any text of an engine.

NgramIndex maps the shortest n-grams to their latest end, and each end to the previous one. Adding a token takes a
microsecond and about 200 bytes; a lookup compares the ends from the latest on.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import NamedTuple

from tot.decoders.drafting.drafters import Draft, DraftContext, Drafter
from tot.decoders.drafting.planner import SpeculationPlanner

_LOOKUP_DEPTH = 3
"""Depth from which acceptance of looked-up tokens is about constant."""


_BITS = 32
_POSITION = (1 << _BITS) - 1
"""A place packs a text's number and, in the low 32 bits, a position in it. Tokens also fit in 32 bits."""
_MAX_ENDS = 512
"""Number of latest ends that a lookup compares, for n-grams that occur often."""


class NgramIndex:
    """Growing texts, and the tokens that followed each n-gram in them (`shortest` <= n <= `longest`).

    At most about `capacity` tokens are kept. The oldest texts are dropped first, with n-grams found in no other text.
    """

    def __init__(self, longest: int = 8, shortest: int = 2, capacity: int = 200_000) -> None:
        self.longest = longest
        self.shortest = shortest
        self.capacity = capacity
        self._texts: dict[int, _Text] = {}
        self._ends: dict[int, int] = {}
        """By shortest n-gram, packed in one number: the latest place where it ended and a token followed."""
        self._size = 0
        self._next = 0

    def begin(self) -> int:
        """Begin a text and return its number."""
        self._next += 1
        self._texts[self._next] = _Text(array("q"), array("q"))
        return self._next

    def __contains__(self, text: int) -> bool:
        return text in self._texts

    def extend(self, text: int, tokens: Sequence[int]) -> None:
        """Append tokens to a text. A dropped text is ignored."""
        entry = self._texts.get(text)
        if entry is None:
            return
        for token in tokens:
            end = len(entry.tokens)  # the n-gram that ends here now has a continuation
            before = 0
            if end >= self.shortest:
                gram, place = _pack(entry.tokens[end - self.shortest : end]), text << _BITS | end
                before, self._ends[gram] = self._ends.get(gram, 0), place
            entry.tokens.append(token)
            entry.before.append(before)
        self._size += len(tokens)
        while self._size > self.capacity and len(self._texts) > 1:
            self._forget(next(iter(self._texts)))

    def follow(self, tail: Sequence[int], count: int) -> tuple[int, list[int]]:
        """Return the length of the longest known suffix of `tail`, and up to `count` tokens after its latest match."""
        suffix = list(tail[-self.longest :])
        suffix.reverse()
        if len(suffix) < self.shortest:
            return 0, []
        place = self._ends.get(_pack(suffix[: self.shortest][::-1]), 0)
        best, match = 0, 0
        for _ in range(_MAX_ENDS):
            text, end = place >> _BITS, place & _POSITION
            if (entry := self._texts.get(text)) is None:
                break
            length = self.shortest
            for token in suffix[length:]:
                if length == end or entry.tokens[end - length - 1] != token:
                    break
                length += 1
            if length > best:
                best, match = length, place
            if best == len(suffix):
                break
            place = entry.before[end]
        if not best:
            return 0, []
        end = match & _POSITION
        return best, self._texts[match >> _BITS].tokens[end : end + count].tolist()

    def _forget(self, text: int) -> None:
        entry = self._texts.pop(text)
        self._size -= len(entry.tokens)
        for end in range(len(entry.tokens) - 1, self.shortest - 1, -1):
            gram = _pack(entry.tokens[end - self.shortest : end])
            if self._ends.get(gram, 0) >> _BITS == text:
                if entry.before[end] >> _BITS in self._texts or entry.before[end] >> _BITS == text:
                    self._ends[gram] = entry.before[end]
                else:
                    del self._ends[gram]


class _Text(NamedTuple):
    tokens: array[int]
    before: array[int]
    """By position: the previous place where the same n-gram ended, or 0 for a new n-gram."""


def _pack(gram: Sequence[int]) -> int:
    number = 0
    for token in gram:
        number = number << _BITS | token
    return number


class LookupDrafter(Drafter):
    """Drafts the tokens that followed the latest occurrence of the text's last tokens, in any text of this engine.

    Prompt lookup (Saxena, 2023) that also covers sibling and ancestor branches, since these are texts of the engine.
    """

    def __init__(self) -> None:
        self.index = NgramIndex()
        self._texts: dict[int, tuple[int, int]] = {}
        """By key: the text's number in the index, and the number of its tokens there."""
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
                self._prompts = {indexed: text for indexed, text in self._prompts.items() if text in self.index}
                self._prompts[prompt] = self.index.begin()
                self.index.extend(self._prompts[prompt], prompt)
            # A text begins with the end of the prompt, so that n-grams can span both.
            self._texts[context.key] = self.index.begin(), max(0, len(prompt) - self.index.longest)
        text, indexed = self._texts[context.key]
        self.index.extend(text, context.tokens[indexed:])
        self._texts[context.key] = text, len(context.tokens)

    def end(self, key: int) -> None:
        self._texts.pop(key, None)
