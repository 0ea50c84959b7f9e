"""BFS: the end of the search and its answer when a budget is spent."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tot import Budget, Solution


def test_a_node_budget_ends_growth_and_the_answer_is_asked_at_that_depth(
    letters: Any, scripted: Any, two_levels: Any, grow: Callable[..., Solution]
) -> None:
    decoder = scripted(two_levels)
    solution = grow(letters, decoder, budget=Budget(nodes=2))
    assert solution.stopped == "budget: nodes (2 of 2)"
    assert decoder.prompts == [["grow"], ["value a", "value b"], ["answer b"]]  # existing thoughts are still evaluated
    whole = scripted(two_levels)
    assert grow(letters, whole, budget=Budget(nodes=3)).stopped is None  # a started level is finished
    assert whole.prompts[-1] == ["answer b/d"]


@pytest.mark.parametrize(
    ("budget", "stopped", "batches"),
    [
        ({"tokens": 9}, "tokens (10 of 9)", 1),
        ({"tokens": 20}, "tokens (20 of 20)", 2),
        ({"tokens": 21}, "tokens (40 of 21)", 3),
        ({"tokens": 60}, "tokens (60 of 60)", 4),
    ],
)
def test_a_spent_budget_ends_the_search_and_is_named(
    letters: Any,
    scripted: Any,
    budget: dict[str, int],
    stopped: str,
    batches: int,
    two_levels: Any,
    grow: Callable[..., Solution],
) -> None:
    decoder = scripted(two_levels)
    whole = scripted(two_levels)
    grow(letters, whole)
    solution = grow(letters, decoder, budget=Budget(**budget))
    assert solution.stopped == f"budget: {stopped}"
    assert decoder.prompts == whole.prompts[:batches]


@pytest.mark.parametrize("limit", ["tokens", "forwards", "seconds", "nodes"])
def test_a_budget_of_zero_sends_no_request(
    letters: Any, scripted: Any, limit: str, two_levels: Any, grow: Callable[..., Solution]
) -> None:
    decoder = scripted(two_levels)
    solution = grow(letters, decoder, budget=Budget(**{limit: 0}))
    assert decoder.batches == []
    assert solution.stopped is not None
    assert solution.stopped.startswith(f"budget: {limit} (")
    assert (solution.answer, solution.value, len(solution.tree), solution.calls) == (None, None, 1, 0)


def test_thoughts_cut_off_by_a_budget_are_dropped_but_are_not_parse_failures(
    letters: Any, scripted: Any, grow: Callable[..., Solution], values: Callable[..., dict[str, float | None]]
) -> None:
    cut = scripted.completion("half a tho", "budget")
    solution = grow(letters, scripted({"grow": [cut, "b"], "value b": "4"}), depth=2)
    assert values(solution.tree) == {"b": 4}
    assert solution.parse_failures == 0
