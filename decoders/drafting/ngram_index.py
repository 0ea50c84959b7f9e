"""NgramIndex: the tokens that followed each n-gram of growing texts, in arrays of bounded size.

The latest tokens of all texts are in one ring. Links join the tokens of a text. One hash table per n maps each n-gram
to the place after its latest occurrence. Hashes may collide, so a lookup compares the tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

_MULTIPLIER = 0x9E3779B97F4A7C15
_MASK = 2**64 - 1
_FEW = 12
"""Up to this number of tokens, a loop is faster than array operations."""
_MIN_BUCKETS = 2**12


@dataclass(slots=True)
class Text:
    """The end of a growing text: the place of its last token, and the number of tokens written at that time."""

    place: int = -1
    written: int = 0


class NgramIndex:
    """The n-grams (`shortest` <= n <= `longest`) of the latest `capacity` tokens of all texts, in at most 18 MB."""

    def __init__(self, longest: int = 8, shortest: int = 2, capacity: int = 2**18) -> None:
        self.longest = longest
        self.shortest = shortest
        self.capacity = capacity
        self.written = 0
        """Number of tokens written so far, overwritten ones included."""
        self._tokens, self._before, self._after = (np.zeros(capacity, np.int32) for _ in range(3))
        # Access to single elements is faster through memory views.
        self._token_at = self._tokens.data
        self._place_before = self._before.data
        self._place_after = self._after.data
        self._make_tables(_MIN_BUCKETS)

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        return sum(array.nbytes for array in (self._tokens, self._before, self._after, *self._tables))

    def _make_tables(self, buckets: int) -> None:
        self._buckets = buckets
        self._shift = 65 - buckets.bit_length()
        self._tables = [np.zeros(buckets, np.int32) for _ in range(self.shortest, self.longest + 1)]
        self._views = [table.data for table in self._tables]

    def extend(self, text: Text, tokens: Sequence[int]) -> None:
        """Append tokens to a text. Its earlier tokens may have been overwritten."""
        tokens = tokens[-(self.capacity // 2 or 1) :]
        if self.written + len(tokens) - text.written >= self.capacity:
            text.place = -1
        if len(tokens) <= _FEW:
            for token in tokens:
                self._append(text, token)
        else:
            self._append_all(text, np.array(tokens, np.int32))
        text.written = self.written
        while 2 * min(self.written, self.capacity) > self._buckets:
            self._make_tables(2 * self._buckets)
            self._add(np.arange(max(0, self.written - self.capacity), self.written) % self.capacity)

    def _append(self, text: Text, token: int) -> None:
        tokens, before = self._token_at, self._place_before
        place, earlier = self.written % self.capacity, text.place
        tokens[place], before[place], self._place_after[place] = token, earlier, -1
        self.written += 1
        text.place = place
        if earlier < 0:
            return
        self._place_after[earlier] = place
        gram = age = 0
        for length in range(1, self.longest + 1):
            older = (place - earlier) % self.capacity
            if earlier < 0 or older <= age:  # the text begins here, or its earlier tokens were overwritten
                return
            age = older
            gram = (gram + tokens[earlier] + 1) * _MULTIPLIER & _MASK
            if length >= self.shortest:
                self._views[length - self.shortest][gram >> self._shift] = place
            earlier = before[earlier]

    def _append_all(self, text: Text, tokens: np.ndarray[Any, np.dtype[np.int32]]) -> None:
        places = (self.written + np.arange(len(tokens))) % self.capacity
        self._tokens[places] = tokens
        self._before[places] = [text.place, *places[:-1]]
        self._after[places] = [*places[1:], -1]
        if text.place >= 0:
            self._after[text.place] = places[0]
        self.written += len(tokens)
        text.place = int(places[-1])
        self._add(places)

    def _add(self, places: np.ndarray[Any, Any]) -> None:
        """Add the n-grams before these places, which are in the order in which they were written."""
        newest = self.written - 1
        earlier, age = self._before[places], (newest - places) % self.capacity
        grams = np.zeros(len(places), np.uint64)
        for length in range(1, self.longest + 1):
            older = (newest - earlier) % self.capacity
            known = (earlier >= 0) & (older > age)
            places, earlier, age, grams = places[known], earlier[known], older[known], grams[known]
            grams = (grams + self._tokens[earlier].astype(np.uint64) + np.uint64(1)) * np.uint64(_MULTIPLIER)
            if length >= self.shortest:
                self._tables[length - self.shortest][grams >> np.uint64(self._shift)] = places  # the last one stays
            earlier = self._before[earlier]

    def follow(self, tail: Sequence[int], count: int, text: Text | None = None) -> tuple[int, list[int]]:
        """Return the length of the longest known suffix of `tail`, and up to `count` tokens after its latest match.

        If `text` ends in `tail` and the match is in it, the tokens after the match repeat when they reach its end.
        """
        suffix = tail[: -self.longest - 1 : -1]
        grams, gram = [], 0
        for token in suffix:
            gram = (gram + token + 1) * _MULTIPLIER & _MASK
            grams.append(gram >> self._shift)
        for length in range(len(suffix), self.shortest - 1, -1):
            place = self._views[length - self.shortest][grams[length - 1]]
            if self._is_after(place, suffix[:length]):
                return length, self._continuation(place, count, text)
        return 0, []

    def _is_after(self, place: int, suffix: Sequence[int]) -> bool:
        """Return whether the tokens before a place are `suffix`, the last one first."""
        if place >= self.written:
            return False
        newest, tokens, before = self.written - 1, self._token_at, self._place_before
        age = (newest - place) % self.capacity
        for token in suffix:
            place = before[place]
            older = (newest - place) % self.capacity
            if place < 0 or older <= age or tokens[place] != token:
                return False
            age = older
        return True

    def _continuation(self, place: int, count: int, text: Text | None) -> list[int]:
        tokens: list[int] = []
        first = place
        while place >= 0 and len(tokens) < count:
            tokens.append(self._token_at[place])
            place = first if text is not None and place == text.place else self._place_after[place]
        return tokens
