"""Jacobi trajectories: windows, their points, and windows that are left out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import pytest
from torch import Tensor

from tot.decoders import Completion, Engine, Request, Usage, load_decoder
from tot.decoders.training.cllm.trajectories import windows

pytestmark = pytest.mark.training


def completion(tokens: Sequence[int], trajectory: Sequence[tuple[int, tuple[int, ...]]]) -> Completion:
    return Completion("", tuple(tokens), 0.0, "eos", Usage(), trajectory=tuple(trajectory))


@pytest.mark.parametrize("n", [2, 6, 13])
def test_points_follow_from_each_other_by_equation_3(
    engine: Engine, target: Any, logits_alone: Callable[..., Tensor], n: int, requests: Callable[..., list[Request]]
) -> None:
    with load_decoder("jacobi", engine=engine, n=n, adapt=False, trajectory=True) as decoder:
        texts = decoder.generate(requests(4, tokens=40, heat=0.0))
    seen = 0
    for request, text in zip(requests(4), texts, strict=True):
        prompt = engine.codec.encode_prompt(request.prompt)
        found = windows(text, n)
        assert found
        for start, points, fixed in found:
            assert fixed == list(text.tokens[start : start + n])[: len(fixed)]
            assert fixed not in points
            before = [*prompt, *text.tokens[:start]]
            for point, later in pairwise([*points, fixed]):  # the last point leads to the fixed one
                assert len(point) == len(fixed)
                logits = logits_alone(target, [*before, *point[:-1]])[len(before) - 1 :]
                assert logits.argmax(-1).tolist() == later
                seen += 1
    assert seen > 40


def test_windows_do_not_overlap_and_start_with_prompt_tokens(
    engine: Engine, requests: Callable[..., list[Request]]
) -> None:
    (request,) = requests(1, tokens=60)
    with load_decoder("jacobi", engine=engine, n=7, adapt=False, trajectory=True) as decoder:
        (text,) = decoder.generate([request])
    found = windows(text, 7)
    starts = [start for start, _, _ in found]
    assert starts[0] == 0
    assert all(later - start in (7, 8) for start, later in pairwise(starts))
    prompt = set(engine.codec.encode_prompt(request.prompt))
    assert all(set(points[0]) <= prompt for _, points, _ in found)


def test_points_are_complete_even_if_a_step_computes_the_rest_of_a_window() -> None:
    text = completion(
        [1, 2, 3, 4, 5, 6, 7],
        [(0, (9, 9, 9)), (1, (8, 3)), (2, (3,)), (4, (5, 9, 7)), (6, (7,))],
    )
    assert windows(text, 3) == [(0, [[9, 9, 9], [1, 8, 3]], [1, 2, 3]), (4, [[5, 9, 7]], [5, 6, 7])]


def test_a_window_guessed_correctly_at_once_has_no_points() -> None:
    assert windows(completion([1, 2, 3, 4], [(0, (1, 2, 3))]), 3) == [(0, [], [1, 2, 3])]


def test_a_window_at_the_end_holds_the_rest_of_the_text() -> None:
    points = [(0, (9, 9, 9)), (1, (2, 3)), (4, (8, 8, 8)), (5, (7, 7))]
    first = (0, [[9, 9, 9]], [1, 2, 3])
    expected = [first, (4, [[8, 8, 8], [5, 7, 7]], [5, 6, 7])]
    assert windows(completion([1, 2, 3, 4, 5, 6, 7], points), 3) == expected
    assert windows(completion([1, 2, 3, 4, 5, 6], points), 3) == [first, (4, [[8, 8], [5, 7]], [5, 6])]
    assert windows(completion([1, 2, 3, 4, 5], points[:3]), 3) == [first, (4, [[8]], [5])]
    assert windows(completion([1, 2], points[:2]), 3) == [(0, [[9, 9]], [1, 2])]  # a text shorter than a window
    no_room = [(0, (5, 5)), (1, (5,)), (2, ())]  # the last token that fits is never guessed
    assert windows(completion([1, 2, 3], no_room), 3) == [(0, [[5, 5], [1, 5]], [1, 2])]
    assert windows(completion([], []), 3) == []


@pytest.mark.parametrize("tokens", [1, 2, 5, 6, 7, 11, 12, 13, 14])
def test_windows_cover_all_guessed_tokens_of_a_text(
    engine: Engine, tokens: int, requests: Callable[..., list[Request]]
) -> None:
    with load_decoder("jacobi", engine=engine, n=6, adapt=False, trajectory=True) as decoder:
        (text,) = decoder.generate(requests(1, tokens=tokens))
    assert len(text.tokens) == tokens
    guessed = {at + i for at, guesses in text.trajectory for i in range(len(guesses))}
    found = windows(text, 6)
    assert {start + i for start, _, fixed in found for i in range(len(fixed))} == guessed & set(range(tokens))
    assert all(len(fixed) == 6 for _, _, fixed in found[:-1])
    assert len(guessed) >= tokens - 1 - tokens // 7
    for start, points, fixed in found:
        assert fixed == list(text.tokens[start : start + len(fixed)])
        assert all(len(point) == len(fixed) for point in points)
