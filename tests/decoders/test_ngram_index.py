"""NgramIndex against an exhaustive search of all texts for each suffix."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from tot.decoders.drafting.lookup import LONGEST, Guess, NgramIndex

texts = st.lists(st.lists(st.integers(0, 1), max_size=40), min_size=1, max_size=8)


def searched(known: Sequence[Sequence[int]], tail: Sequence[int]) -> Guess | None:
    """Return the guess for a tail after indexing the texts one after another."""
    for n in range(min(LONGEST, len(tail)), 0, -1):
        gram = list(tail[len(tail) - n :])
        followed = [text[at] for text in known for at in range(n, len(text)) if list(text[at - n : at]) == gram]
        if followed:
            streak = 1
            for before, token in itertools.pairwise(followed):
                streak = min(streak + 1, 3) if token == before else 0
            return Guess(followed[-1], n, streak)
    return None


def indexed(known: Sequence[Sequence[int]], **options: int) -> NgramIndex:
    index = NgramIndex(**options)
    for text in known:
        index.extend(text, 0)
    return index


@given(texts, st.lists(st.integers(0, 1), max_size=10))
def test_a_guess_equals_an_exhaustive_search(known: list[list[int]], tail: list[int]) -> None:
    index = indexed(known)
    for end in (tail, *known):
        assert index.guess(end) == searched(known, end)


def test_a_text_may_be_indexed_in_pieces() -> None:
    rng = random.Random(1)
    text = rng.choices(range(50), k=400)
    whole, pieces = indexed([text]), NgramIndex()
    for start, end in itertools.pairwise([0, 1, 7, 100, 101, 400]):
        pieces.extend(text[:end], start)
    tails = [text[at : at + 6] for at in range(394)]
    assert [pieces.guess(tail) for tail in tails] == [whole.guess(tail) for tail in tails]


def test_new_entries_replace_old_ones() -> None:
    index = indexed([range(10_000), range(50_000, 51_000)], entries=2**12)
    tails = [[at, at + 1] for at in range(50_900, 50_990)]
    found = [index.guess(tail) for tail in tails]
    right = [guess for guess, (_, last) in zip(found, tails, strict=True) if guess and guess.token == last + 1]
    assert len(right) > 60
    assert all(guess in right for guess in found if guess is not None)  # the hash identifies an n-gram
    assert sum(index.guess([at, at + 1]) is not None for at in range(100)) < 20
