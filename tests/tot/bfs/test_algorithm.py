"""BFS: the tree, the selected states, and the end of the search."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tot import Solution, State, Task


def test_the_tree_the_order_of_calls_and_the_answer_match_algorithm_1(
    letters: Any,
    scripted: Any,
    two_levels: Any,
    grow: Callable[..., Solution],
    paths: Callable[..., list[str]],
    values: Callable[..., dict[str, float | None]],
) -> None:
    decoder = scripted(two_levels)
    solution = grow(letters, decoder)
    assert decoder.prompts == [
        ["grow"],
        ["value a", "value b"],
        ["grow b", "grow a"],  # the better state first
        ["value b/c", "value b/d", "value a/e", "value a/f"],
        ["answer b/d"],
    ]
    assert paths(solution.tree) == ["", "a", "b", "b/c", "b/d", "a/e", "a/f"]
    assert values(solution.tree) == {"a": 3, "b": 7, "b/c": 2, "b/d": 9, "a/e": 9, "a/f": 5}
    assert [solution.tree.place(node) for node in solution.tree] == [
        "0",
        "0.0",
        "0.1",
        "0.1.0",
        "0.1.1",
        "0.0.0",
        "0.0.1",
    ]
    assert [node.depth for node in solution.tree] == [0, 1, 1, 2, 2, 2, 2]
    assert [path for path, node in zip(paths(solution.tree), solution.tree, strict=True) if node.chosen] == [
        "",
        "b",
        "b/d",
    ]
    assert (solution.answer, solution.value, solution.stopped) == ("the end", 9, None)


@pytest.fixture
def final(letters: Any) -> type[Task]:
    """Letters with terminal thoughts: thoughts that end in "!"."""

    class Final(letters):  # type: ignore[misc]
        def is_terminal(self, state: State) -> bool:
            return state.text.endswith("!")

    return Final


def test_a_terminal_state_stays_in_the_frontier_and_is_never_expanded(
    final: Any, scripted: Any, grow: Callable[..., Solution]
) -> None:
    decoder = scripted(
        {
            "grow": ["a!", "b"],
            "value a!": "8",
            "value b": "6",
            "grow b": ["c", "d"],
            "value b/c": "9",
            "value b/d": "2",
            "grow b/c": ["e", "f"],
            "value b/c/e": "3",
            "value b/c/f": "1",
        }
    )
    solution = grow(final, decoder, depth=4)
    assert [batch for batch in decoder.prompts if batch[0].startswith("grow")] == [["grow"], ["grow b"], ["grow b/c"]]
    assert decoder.prompts[-1] == ["answer a!"]  # value 8, kept for two levels, against 3 and 1
    assert [node.id for node in solution.tree if node.terminal] == [1]
    assert solution.value == 8
