"""NgramIndex against an exhaustive search of all texts for each suffix."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tot.decoders.drafting.lookup import NgramIndex

Pieces = list[tuple[int, list[int]]]
"""(which text, tokens to append), in order of insertion."""

tokens = st.lists(st.integers(0, 2), max_size=12)
pieces = st.lists(st.tuples(st.integers(0, 3), tokens), max_size=12)
bounds = st.tuples(st.integers(1, 3), st.integers(0, 3)).map(lambda pair: (pair[0], sum(pair)))


class Searched:
    """The same texts in plain lists, and the insertion order of their tokens."""

    def __init__(self, texts: int, longest: int, shortest: int, capacity: int) -> None:
        self.lengths = range(longest, shortest - 1, -1)
        self.capacity = capacity
        self.texts: dict[int, list[int]] = {text: [] for text in range(texts)}
        self.inserted: list[tuple[int, int]] = []
        """(text, position) of each token."""

    def extend(self, text: int, piece: Sequence[int]) -> None:
        if text not in self.texts:
            return
        for token in piece:
            self.inserted.append((text, len(self.texts[text])))
            self.texts[text].append(token)
        while sum(map(len, self.texts.values())) > self.capacity and len(self.texts) > 1:
            del self.texts[min(self.texts)]
            self.inserted = [place for place in self.inserted if place[0] in self.texts]

    def follow(self, tail: Sequence[int], count: int) -> tuple[int, list[int]]:
        for n in self.lengths:
            for text, at in reversed(self.inserted):
                if n <= min(len(tail), at) and self.texts[text][at - n : at] == list(tail[len(tail) - n :]):
                    return n, self.texts[text][at : at + count]
        return 0, []


def both(texts: int, longest: int, shortest: int, capacity: int, inserted: Pieces) -> tuple[NgramIndex, Searched]:
    """Create all texts before inserting the first piece."""
    index, searched = NgramIndex(longest, shortest, capacity), Searched(texts, longest, shortest, capacity)
    numbers = [index.begin() for _ in range(texts)]
    for text, piece in inserted:
        index.extend(numbers[text], piece)
        searched.extend(text, piece)
        assert [number in index for number in numbers] == [known in searched.texts for known in range(texts)]
    return index, searched


@given(pieces, bounds, tokens, st.integers(0, 5))
def test_the_continuation_equals_an_exhaustive_search(
    inserted: Pieces, bounds: tuple[int, int], tail: list[int], count: int
) -> None:
    index, searched = both(4, bounds[1], bounds[0], 10**6, inserted)
    assert index.follow(tail, count) == searched.follow(tail, count)
    for text in searched.texts.values():
        assert index.follow(text, count) == searched.follow(text, count)


@given(st.lists(tokens, min_size=1, max_size=6), st.integers(0, 30), tokens)
def test_texts_inserted_one_by_one_are_evicted_in_that_order(
    texts: list[list[int]], capacity: int, tail: list[int]
) -> None:
    index, searched = both(len(texts), 4, 2, capacity, list(enumerate(texts)))
    assert index.follow(tail, 3) == searched.follow(tail, 3)


@given(pieces, st.integers(0, 30), tokens)
def test_a_continuation_after_eviction_comes_from_a_remaining_text(
    inserted: Pieces, capacity: int, tail: list[int]
) -> None:
    index, searched = both(4, 4, 2, capacity, inserted)
    _, found = index.follow(tail, 3)
    if found:
        places = [
            text[at : at + 3]
            for text in searched.texts.values()
            for at in range(2, len(text))
            if text[at - 2 : at] == tail[-2:]
        ]
        assert found in places


def test_a_longer_match_wins_over_a_later_shorter_one() -> None:
    index = NgramIndex()
    early, late = index.begin(), index.begin()
    index.extend(early, [1, 2, 3, 4, 5])
    index.extend(late, [9, 2, 3, 7, 8])
    assert index.follow([1, 2, 3], 2) == (3, [4, 5])
    assert index.follow([0, 2, 3], 2) == (2, [7, 8])


def test_of_two_equal_matches_the_one_continued_last_wins() -> None:
    index = NgramIndex()
    first, second = index.begin(), index.begin()
    index.extend(first, [1, 2])
    index.extend(second, [1, 2, 6])
    assert index.follow([1, 2], 1) == (2, [6])
    index.extend(first, [5])
    assert index.follow([1, 2], 1) == (2, [5])


def test_a_repetitive_text_is_continued_by_its_own_tokens() -> None:
    index = NgramIndex()
    index.extend(index.begin(), [1, 2, 1, 2, 1, 2])
    assert index.follow([1, 2], 4) == (
        2,
        [1, 2],
    )  # nothing follows the last match, so the one before is used


@pytest.mark.parametrize("tail", [[], [2], [8, 9], [2, 1], [3, 4]])
def test_an_unknown_tail_has_no_continuation(tail: list[int]) -> None:
    index = NgramIndex()
    index.extend(index.begin(), [1, 2, 3, 4])
    assert index.follow(tail, 3) == (0, [])
    assert index.follow([1, 2], 0) == (2, [])


def test_tokens_for_an_evicted_text_are_dropped() -> None:
    index = NgramIndex(capacity=4)
    old, new = index.begin(), index.begin()
    index.extend(old, [1, 2, 3])
    index.extend(new, [4, 5, 6])
    assert [old in index, new in index] == [False, True]
    index.extend(old, [1, 2, 3, 1, 2])
    assert index.follow([1, 2], 1) == (0, [])
    assert index.follow([4, 5], 1) == (2, [6])
    index.extend(new, [7])  # the dropped tokens do not count
    assert new in index


def test_one_text_may_be_larger_than_the_capacity() -> None:
    index = NgramIndex(capacity=3)
    text = index.begin()
    index.extend(text, [1, 2, 3, 4, 5, 6])
    assert index.follow([1, 2], 9) == (2, [3, 4, 5, 6])
