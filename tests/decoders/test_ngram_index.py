"""NgramIndex against an exhaustive search of all texts for each suffix."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tot.decoders.drafting.ngram_index import Guess, NgramIndex, Text

Pieces = list[tuple[int, list[int]]]
"""(which text, tokens to append), in order of insertion."""

tokens = st.lists(st.integers(0, 2), max_size=30)
pieces = st.lists(st.tuples(st.integers(0, 3), tokens), max_size=12)


class Searched:
    """The same texts in plain lists, and the latest `capacity` tokens in order of insertion."""

    def __init__(self, texts: int, longest: int, capacity: int) -> None:
        self.longest = longest
        self.capacity = capacity
        self.texts: dict[int, list[int]] = {text: [] for text in range(texts)}
        self.inserted: list[tuple[int, int]] = []
        """(text, position) of each token."""

    def extend(self, text: int, piece: Sequence[int]) -> None:
        for token in piece:
            self.inserted.append((text, len(self.texts[text])))
            self.texts[text].append(token)

    def guess(self, tail: Sequence[int]) -> tuple[int, int, int] | None:
        """Return the token, the length of the match and the streak."""
        known = self.inserted[-self.capacity :]
        oldest: dict[int, int] = {}
        for text, at in known:
            oldest.setdefault(text, at)
        for n in range(min(self.longest, len(tail)), 0, -1):
            followed = [
                self.texts[text][at]
                for text, at in known
                if n <= at - oldest[text] and self.texts[text][at - n : at] == [*tail[len(tail) - n :]]
            ]
            if followed:
                streak = 1
                for before, token in itertools.pairwise(followed):
                    streak = min(streak + 1, 3) if token == before else 0
                return followed[-1], n, streak
        return None


def both(capacity: int, inserted: Pieces) -> tuple[NgramIndex, Searched]:
    index, searched = NgramIndex(capacity=capacity), Searched(4, 6, capacity)
    texts = [Text() for _ in range(4)]
    for text, piece in inserted:
        index.extend(texts[text], piece)
        searched.extend(text, piece)
    return index, searched


@given(pieces, tokens, st.sampled_from([100, 2**18]))
def test_a_guess_is_a_token_after_a_match(inserted: Pieces, tail: list[int], capacity: int) -> None:
    index, searched = both(capacity, inserted)
    for end in [tail, *searched.texts.values()]:
        guess, longest = index.guess(end), searched.guess(end)
        if guess is None:
            continue
        assert longest is not None
        assert guess.matched <= longest[1]
        assert guess.streak in range(4)
        gram = end[len(end) - guess.matched :]
        assert guess.token in [
            searched.texts[text][at]
            for text, at in searched.inserted
            if searched.texts[text][max(0, at - guess.matched) : at] == gram
        ]


@pytest.mark.parametrize("capacity", [2_000, 2**18])
@pytest.mark.parametrize("vocabulary", [4, 40, 4000])
def test_nearly_all_matches_are_the_longest_and_the_latest(vocabulary: int, capacity: int) -> None:
    rng = random.Random(vocabulary)
    inserted = [(rng.randrange(4), rng.choices(range(vocabulary), k=rng.choice([1, 3, 60]))) for _ in range(200)]
    index, searched = both(capacity, inserted)
    tails = [text[:end][-8:] for text in searched.texts.values() for end in range(8, len(text), 9)]
    equal = [(guess, index.guess(tail)) for tail in tails if (guess := searched.guess(tail)) is not None]
    matches = [guess for guess, found in equal if found is not None and found[:2] == guess[:2]]
    assert len(matches) > 0.7 * len(equal) > 70
    assert sum(guess == found for guess, found in equal) > 0.4 * len(matches)  # collisions end a streak


def test_a_longer_match_wins_over_a_later_shorter_one() -> None:
    index = NgramIndex()
    index.extend(Text(), [1, 2, 3, 4, 5])
    index.extend(Text(), [9, 2, 3, 7, 8])
    assert index.guess([1, 2, 3]) == Guess(4, 3, 1)
    assert index.guess([0, 2, 3]) == Guess(7, 2, 0)
    assert index.guess([0, 0, 3]) == Guess(7, 1, 0)


def test_of_two_equal_matches_the_one_continued_last_wins() -> None:
    index, first, second = NgramIndex(), Text(), Text()
    index.extend(first, [1, 2])
    index.extend(second, [1, 2, 6])
    assert index.guess([1, 2]) == Guess(6, 2, 1)
    index.extend(first, [5])
    assert index.guess([1, 2]) == Guess(5, 2, 0)


@pytest.mark.parametrize("batch", [False, True])
@pytest.mark.parametrize(
    ("followers", "streak"), [([3], 1), ([3, 3], 2), ([3] * 9, 3), ([4, 3], 0), ([4, 3, 3], 1), ([3, 3, 3, 4], 0)]
)
def test_a_streak_counts_how_often_a_token_followed_in_a_row(followers: list[int], streak: int, batch: bool) -> None:
    index, text = NgramIndex(), Text()
    pieces = [[1, 2, token, 7 + at] for at, token in enumerate(followers)]
    if batch:  # more than twelve tokens at once are indexed by array operations
        index.extend(text, [*range(100, 120), *itertools.chain(*pieces)])
    for piece in [] if batch else pieces:
        index.extend(text, piece)
    assert index.guess([1, 2]) == Guess(followers[-1], 2, streak)


def test_a_streak_continues_from_one_batch_to_the_next() -> None:
    index, text = NgramIndex(), Text()
    for start in (100, 200):
        index.extend(text, [*range(start, start + 20), 1, 2, 3])
    assert index.guess([1, 2]) == Guess(3, 2, 2)


@pytest.mark.parametrize("tail", [[], [5], [8, 9], [4]])
def test_there_is_no_guess_after_an_unknown_token(tail: list[int]) -> None:
    index = NgramIndex()
    index.extend(Text(), [1, 2, 3, 4])
    assert index.guess(tail) is None


def test_the_oldest_tokens_are_overwritten_and_their_text_can_be_extended() -> None:
    index, old, new = NgramIndex(capacity=8), Text(), Text()
    index.extend(old, [1, 2, 3])
    index.extend(new, [4, 5, 6, 4])
    assert index.guess([1, 2]) == Guess(3, 2, 1)
    index.extend(new, [7, 8, 9, 1])
    assert index.guess([1, 2]) is None
    assert index.guess([5, 6]) == Guess(4, 2, 1)
    index.extend(old, [1, 2, 3])
    assert index.guess([1, 2]) == Guess(3, 2, 0)  # the earlier occurrence is unknown by now
    assert index.guess([0, 3]) is None  # the text continues without its beginning


def test_one_text_may_be_larger_than_the_capacity() -> None:
    index = NgramIndex(capacity=100)
    index.extend(Text(), range(1000))
    assert index.guess([997, 998]) == Guess(999, 2, 1)
    assert index.guess([10, 11]) is None


def test_the_size_is_bounded() -> None:
    index, text = NgramIndex(), Text()
    index.extend(text, range(10_000))
    assert index.nbytes < 5_000_000
    for start in range(10_000, 400_000, 60_000):
        index.extend(text, range(start, start + 60_000))
    assert index.nbytes < 15_000_000
    assert index.guess([369_990, 369_991]) == Guess(369_992, 2, 1)
