"""Jacobi trajectories: windows, their points, and which are left out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import pytest
from torch import Tensor

from tot.decoders import Completion, Engine, Request, Usage, load_decoder
from tot.decoders.cllm.trajectories import windows


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
        for start, points in found:
            fixed = list(text.tokens[start : start + n])
            assert fixed not in points
            before = [*prompt, *text.tokens[:start]]
            for point, later in pairwise([*points, fixed]):  # the last point leads to the fixed one
                assert len(point) == n
                logits = logits_alone(target, [*before, *point[:-1]])[len(before) - 1 :]
                assert logits.argmax(-1).tolist() == later
                seen += 1
    assert seen > 40


def test_windows_are_apart_and_begin_with_tokens_of_the_prompt(
    engine: Engine, requests: Callable[..., list[Request]]
) -> None:
    (request,) = requests(1, tokens=60)
    with load_decoder("jacobi", engine=engine, n=7, adapt=False, trajectory=True) as decoder:
        (text,) = decoder.generate([request])
    found = windows(text, 7)
    starts = [start for start, _ in found]
    assert starts[0] == 0
    assert all(later - start in (7, 8) for start, later in pairwise(starts))
    prompt = set(engine.codec.encode_prompt(request.prompt))
    assert all(set(points[0]) <= prompt for _, points in found)


def test_points_are_whole_though_a_step_computes_what_is_left_of_a_window() -> None:
    text = completion(
        [1, 2, 3, 4, 5, 6, 7],
        [(0, (9, 9, 9)), (1, (8, 3)), (2, (3,)), (4, (5, 9, 7)), (6, (7,))],
    )
    assert windows(text, 3) == [(0, [[9, 9, 9], [1, 8, 3]]), (4, [[5, 9, 7]])]


def test_a_window_guessed_right_at_once_has_no_points() -> None:
    assert windows(completion([1, 2, 3, 4], [(0, (1, 2, 3))]), 3) == [(0, [])]


def test_windows_beyond_the_end_are_left_out() -> None:
    points = [(0, (9, 9, 9)), (1, (2, 3)), (4, (8, 8, 8)), (5, (7, 7))]
    assert [start for start, _ in windows(completion([1, 2, 3, 4, 5, 6, 7], points), 3)] == [0, 4]
    assert [start for start, _ in windows(completion([1, 2, 3, 4, 5, 6], points), 3)] == [0]
    assert windows(completion([1, 2], points[:2]), 3) == []
    assert windows(completion([1, 2], [(0, (5, 5)), (1, (5,))]), 3) == []  # there was no room for a whole one
    assert windows(completion([], []), 3) == []


@pytest.mark.parametrize("tokens", [1, 5, 6, 7, 11, 12, 13, 14])
def test_no_window_reaches_beyond_the_most_tokens_of_a_text(
    engine: Engine, tokens: int, requests: Callable[..., list[Request]]
) -> None:
    with load_decoder("jacobi", engine=engine, n=6, adapt=False, trajectory=True) as decoder:
        (text,) = decoder.generate(requests(1, tokens=tokens))
    assert len(text.tokens) == tokens
    starts = [start for start, _ in windows(text, 6)]
    assert tokens // 7 <= len(starts) <= tokens // 6  # where all of one is kept, one token more is
    assert all(start + 6 <= tokens for start in starts)
