"""Blocksworld's generated problems."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest

from tot.decoders.errors import TaskError
from tot.tasks.blocks import Facts, check
from tot.tasks.blocks_planner import generate, shortest_plan


@pytest.mark.parametrize("blocks", [2, 3, 4])
def test_every_possible_length_is_generated(
    blocks: int,
    distances: Callable[..., dict[Facts, int]],
    reachable: Callable[..., list[Facts]],
    start_of: Callable[..., Facts],
) -> None:
    bound = 4 * (blocks - 1)
    for steps, seed in itertools.product(range(2, bound + 1, 2), range(5)):
        problem = generate(seed, blocks, steps)
        check(problem)
        assert len(problem.objects) == blocks
        assert distances(reachable(problem.init), problem.goal)[problem.init] == steps
    names = "abcd"[:blocks]
    towers = [frozenset(("on", x, y) for x, y in itertools.pairwise(order)) for order in itertools.permutations(names)]
    assert max(max(distances(reachable(start_of(names)), goal).values()) for goal in towers) <= bound + 1  # one in hand


@pytest.mark.parametrize(("blocks", "steps"), [(5, 2), (5, 16), (6, 10)])
def test_large_problems_have_the_requested_length(
    blocks: int, steps: int, solves: Callable[..., tuple[bool, int | None]]
) -> None:
    problem = generate(7, blocks, steps)
    check(problem)
    plan = shortest_plan(problem) or []
    assert len(plan) == steps
    assert solves(problem, plan) == (True, None)


def test_problems_are_equal_only_for_equal_seeds() -> None:
    assert generate(3, 5, 8) == generate(3, 5, 8)
    assert len({generate(seed, 5, 8) for seed in range(20)}) == 20


@pytest.mark.parametrize(
    ("blocks", "steps", "message"),
    [
        (4, 14, "no problem of 4 blocks takes 14 steps: give an even number from 2 to 12"),
        (4, 5, "no problem of 4 blocks takes 5 steps"),
        (4, 0, "from 2 to 12"),
        (1, 2, "blocks=1: give 2 to 6"),
        (7, 2, "blocks=7: give 2 to 6"),
    ],
)
def test_an_impossible_length_error_names_the_range(blocks: int, steps: int, message: str) -> None:
    with pytest.raises(TaskError, match=message):
        generate(0, blocks, steps)
