"""BFS: the end of the search and its answer when a budget is spent."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

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


def test_thoughts_cut_off_by_a_budget_are_dropped_but_are_not_parse_failures(
    letters: Any, scripted: Any, grow: Callable[..., Solution], values: Callable[..., dict[str, float | None]]
) -> None:
    cut = scripted.completion("half a tho", "budget")
    solution = grow(letters, scripted({"grow": [cut, "b"], "value b": "4"}), depth=2)
    assert values(solution.tree) == {"b": 4}
    assert solution.parse_failures == 0
