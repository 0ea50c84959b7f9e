"""NgramIndex against an exhaustive search of all texts for each suffix."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tot.decoders.drafting.ngram_index import NgramIndex, Text

Pieces = list[tuple[int, list[int]]]
"""(which text, tokens to append), in order of insertion."""

tokens = st.lists(st.integers(0, 2), max_size=30)
pieces = st.lists(st.tuples(st.integers(0, 3), tokens), max_size=12)


class Searched:
    """The same texts in plain lists, and the latest `capacity` tokens in order of insertion."""

    def __init__(self, texts: int, longest: int, shortest: int, capacity: int) -> None:
        self.lengths = range(longest, shortest - 1, -1)
        self.capacity = capacity
        self.texts: dict[int, list[int]] = {text: [] for text in range(texts)}
        self.inserted: list[tuple[int, int]] = []
        """(text, position) of each token."""

    def extend(self, text: int, piece: Sequence[int]) -> None:
        for token in piece:
            self.inserted.append((text, len(self.texts[text])))
            self.texts[text].append(token)

    def follow(self, tail: Sequence[int], count: int) -> tuple[int, list[int]]:
        known = self.inserted[-self.capacity :]
        oldest: dict[int, int] = {}
        for text, at in known:
            oldest.setdefault(text, at)
        for n in self.lengths:
            for text, at in reversed(known):
                if n <= min(len(tail), at - oldest[text]) and self.texts[text][at - n : at] == [*tail[len(tail) - n :]]:
                    return n, self.texts[text][at : at + count]
        return 0, []


def both(capacity: int, inserted: Pieces) -> tuple[NgramIndex, Searched]:
    index, searched = NgramIndex(capacity=capacity), Searched(4, 8, 2, capacity)
    texts = [Text() for _ in range(4)]
    for text, piece in inserted:
        index.extend(texts[text], piece)
        searched.extend(text, piece)
    return index, searched


@given(pieces, tokens, st.integers(0, 5), st.sampled_from([100, 2**18]))
def test_what_is_found_is_a_match_and_what_followed_it(
    inserted: Pieces, tail: list[int], count: int, capacity: int
) -> None:
    index, searched = both(capacity, inserted)
    for end in [tail, *searched.texts.values()]:
        length, found = index.follow(end, count)
        longest, _ = searched.follow(end, count)
        assert length <= longest
        if length:
            gram = end[len(end) - length :]
            ends = [
                (text, at) for text, at in searched.inserted if searched.texts[text][max(0, at - length) : at] == gram
            ]
            assert found in [searched.texts[text][at : at + count] for text, at in ends]


@pytest.mark.parametrize("capacity", [2_000, 2**18])
@pytest.mark.parametrize("vocabulary", [4, 40, 4000])
def test_nearly_all_matches_are_the_longest_and_the_latest(vocabulary: int, capacity: int) -> None:
    rng = random.Random(vocabulary)
    inserted = [(rng.randrange(4), rng.choices(range(vocabulary), k=rng.choice([1, 3, 60]))) for _ in range(200)]
    index, searched = both(capacity, inserted)
    tails = [text[:end][-8:] for text in searched.texts.values() for end in range(8, len(text), 9)]
    equal = [index.follow(tail, 5) == searched.follow(tail, 5) for tail in tails]
    assert equal.count(True) > 0.7 * len(equal) > 70


def test_a_longer_match_wins_over_a_later_shorter_one() -> None:
    index = NgramIndex()
    index.extend(Text(), [1, 2, 3, 4, 5])
    index.extend(Text(), [9, 2, 3, 7, 8])
    assert index.follow([1, 2, 3], 2) == (3, [4, 5])
    assert index.follow([0, 2, 3], 2) == (2, [7, 8])


def test_of_two_equal_matches_the_one_continued_last_wins() -> None:
    index, first, second = NgramIndex(), Text(), Text()
    index.extend(first, [1, 2])
    index.extend(second, [1, 2, 6])
    assert index.follow([1, 2], 1) == (2, [6])
    index.extend(first, [5])
    assert index.follow([1, 2], 1) == (2, [5])


def test_a_repetitive_text_is_continued_by_its_own_tokens() -> None:
    index, text = NgramIndex(), Text()
    index.extend(text, [1, 2, 1, 2, 1, 2])
    assert index.follow([1, 2], 4) == (2, [1, 2])  # nothing follows the last match, so the one before is used
    assert index.follow([1, 2, 1, 2], 5, text) == (4, [1, 2, 1, 2, 1])


@pytest.mark.parametrize("tail", [[], [2], [8, 9], [2, 1], [3, 4]])
def test_an_unknown_tail_has_no_continuation(tail: list[int]) -> None:
    index = NgramIndex()
    index.extend(Text(), [1, 2, 3, 4])
    assert index.follow(tail, 3) == (0, [])
    assert index.follow([1, 2], 0) == (2, [])


def test_the_oldest_tokens_are_overwritten_and_their_text_can_be_extended() -> None:
    index, old, new = NgramIndex(capacity=8), Text(), Text()
    index.extend(old, [1, 2, 3])
    index.extend(new, [4, 5, 6, 4])
    assert index.follow([1, 2], 1) == (2, [3])
    index.extend(new, [7, 8, 9, 1])
    assert index.follow([1, 2], 1) == (0, [])
    assert index.follow([5, 6], 3) == (2, [4, 7, 8])
    index.extend(old, [1, 2, 3])
    assert index.follow([1, 2], 1) == (2, [3])
    assert index.follow([3, 1], 1) == (0, [])  # the text continues without its beginning


def test_one_text_may_be_larger_than_the_capacity() -> None:
    index = NgramIndex(capacity=100)
    index.extend(Text(), range(1000))
    assert index.follow([997, 998], 9) == (2, [999])
    assert index.follow([10, 11], 9) == (0, [])


def test_the_size_is_bounded() -> None:
    index, text = NgramIndex(), Text()
    index.extend(text, range(10_000))
    assert index.nbytes < 5_000_000
    for start in range(10_000, 400_000, 60_000):
        index.extend(text, range(start, start + 60_000))
    assert index.nbytes < 18_000_000
    assert index.follow([369_990, 369_991], 2) == (2, [369_992, 369_993])
