"""NgramIndex: where the last tokens of a text have been seen before, in any of the texts that it was told.

A dictionary from every n-gram to its latest end: adding a token and looking one up take microseconds, whatever the
size of the texts. It knows nothing of models or branches.
"""

from __future__ import annotations

from collections.abc import Sequence


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
