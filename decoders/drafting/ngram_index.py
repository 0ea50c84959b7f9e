"""NgramIndex: the token that last followed each n-gram of growing texts, in arrays of bounded size.

The latest tokens of all texts are in one ring. Links join the tokens of a text. One hash table per n maps each n-gram
to the place after its latest occurrence, and to a counter of 2 bits: how often the same token followed. Hashes may
collide, so a lookup compares the tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

_MULTIPLIER = 0x9E3779B97F4A7C15
_MASK = 2**64 - 1
_FEW = 12
"""Up to this number of tokens, a loop is faster than array operations."""
_MIN_BUCKETS = 2**12


class Guess(NamedTuple):
    """The token that followed the latest occurrence of a text's last tokens."""

    token: int
    matched: int
    """Number of last tokens that are the same there."""
    streak: int
    """How often the token followed in a row: 1 at first, 0 after another token, at most 3."""


@dataclass(slots=True)
class Text:
    """The end of a growing text: the place of its last token, and the number of tokens written at that time."""

    place: int = -1
    written: int = 0


class NgramIndex:
    """The n-grams (1 <= n <= `longest`) of the latest `capacity` tokens of all texts, in at most 15 MB."""

    def __init__(self, longest: int = 6, capacity: int = 2**18) -> None:
        self.longest = longest
        self.capacity = capacity
        self.written = 0
        """Number of tokens written so far, overwritten ones included."""
        self._tokens, self._before = (np.zeros(capacity, np.int32) for _ in range(2))
        # Access to single elements is faster through memory views.
        self._token_at = self._tokens.data
        self._place_before = self._before.data
        self._make_tables(_MIN_BUCKETS)

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        return sum(array.nbytes for array in (self._tokens, self._before, *self._tables))

    def _make_tables(self, buckets: int) -> None:
        self._buckets = buckets
        self._shift = 65 - buckets.bit_length()
        # By n - 1: 4 * place + streak, or -1.
        self._tables = [np.full(buckets, -1, np.int32) for _ in range(self.longest)]
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
        tokens[place], before[place] = token, earlier
        self.written += 1
        text.place = place
        gram = age = 0
        for table in self._views:
            older = (place - earlier) % self.capacity
            if earlier < 0 or older <= age:  # the text begins here, or its earlier tokens were overwritten
                return
            age = older
            gram = (gram + tokens[earlier] + 1) * _MULTIPLIER & _MASK
            bucket = gram >> self._shift
            last = table[bucket]
            streak = 1 if last < 0 else min((last & 3) + 1, 3) if tokens[last >> 2] == token else 0
            table[bucket] = 4 * place + streak
            earlier = before[earlier]

    def _append_all(self, text: Text, tokens: np.ndarray[Any, np.dtype[np.int32]]) -> None:
        places = (self.written + np.arange(len(tokens))) % self.capacity
        self._tokens[places] = tokens
        self._before[places] = [text.place, *places[:-1]]
        self.written += len(tokens)
        text.place = int(places[-1])
        self._add(places)

    def _add(self, places: np.ndarray[Any, Any]) -> None:
        """Add the n-grams before these places, which are in the order in which they were written."""
        newest = self.written - 1
        earlier, age = self._before[places], (newest - places) % self.capacity
        grams = np.zeros(len(places), np.uint64)
        for table in self._tables:
            older = (newest - earlier) % self.capacity
            known = (earlier >= 0) & (older > age)
            places, earlier, age, grams = places[known], earlier[known], older[known], grams[known]
            grams = (grams + self._tokens[earlier].astype(np.uint64) + np.uint64(1)) * np.uint64(_MULTIPLIER)
            self._enter(table, (grams >> np.uint64(self._shift)).astype(np.int64), places)
            earlier = self._before[earlier]

    def _enter(self, table: np.ndarray[Any, Any], buckets: np.ndarray[Any, Any], places: np.ndarray[Any, Any]) -> None:
        """Enter places in their buckets, each with the streak of its token."""
        order = np.argsort(buckets, kind="stable")
        buckets, places = buckets[order], places[order]
        last, index = table[buckets], np.arange(len(buckets))
        again = buckets == np.roll(buckets, 1)  # the place before is in the same bucket
        again[:1] = False
        same = self._tokens[np.where(again, np.roll(places, 1), last >> 2)] == self._tokens[places]
        # A streak begins at the first place of a bucket, and at each other token.
        first = np.where(again, 0, np.where(last < 0, 1, np.where(same, (last & 3) + 1, 0)))
        begin = np.maximum.accumulate(np.where(again & same, 0, index))
        table[buckets] = 4 * places + np.minimum(first[begin] + index - begin, 3)  # the last one of a bucket stays

    def guess(self, tail: Sequence[int]) -> Guess | None:
        """Return the token after the latest occurrence of the longest known suffix of `tail`, or None."""
        suffix = tail[: -self.longest - 1 : -1]
        entries, gram = [], 0
        for token, table in zip(suffix, self._views, strict=False):
            gram = (gram + token + 1) * _MULTIPLIER & _MASK
            entries.append(table[gram >> self._shift])
        for length in range(len(entries), 0, -1):
            entry = entries[length - 1]
            if entry >= 0 and self._is_after(entry >> 2, suffix[:length]):
                return Guess(self._token_at[entry >> 2], length, entry & 3)
        return None

    def _is_after(self, place: int, suffix: Sequence[int]) -> bool:
        """Return whether the tokens before a place are `suffix`, the last one first."""
        newest, tokens, before = self.written - 1, self._token_at, self._place_before
        age = (newest - place) % self.capacity
        for token in suffix:
            place = before[place]
            older = (newest - place) % self.capacity
            if place < 0 or older <= age or tokens[place] != token:
                return False
            age = older
        return True
