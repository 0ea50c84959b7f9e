"""BFS: the tree, the selected states, and the end of the search."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tot import BFS, Solution, State, Task, Value, solve


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


def test_all_thoughts_of_a_state_are_samples_of_one_request(
    letters: Any, scripted: Any, two_levels: Any, grow: Callable[..., Solution]
) -> None:
    decoder = scripted(two_levels)
    solution = grow(letters, decoder)
    assert [(request.purpose, request.sampling.n) for request in decoder.requests] == [
        ("generate", 2),
        *[("evaluate", 1)] * 2,
        *[("generate", 2)] * 2,
        *[("evaluate", 1)] * 4,
        ("answer", 1),
    ]
    assert solution.calls == 13
    assert solution.usage.new_tokens == 13 * 5


@pytest.mark.parametrize(
    ("breadth", "expanded"), [(1, ["b"]), (2, ["b", "a"]), (3, ["b", "a", "c"]), (4, ["b", "a", "c", "d"])]
)
def test_breadth_keeps_the_most_valuable_states_and_the_first_of_equals(
    letters: Any, scripted: Any, breadth: int, expanded: list[str], grow: Callable[..., Solution]
) -> None:
    level = {"grow": ["a", "b", "c", "d"], "value a": "5", "value b": "8", "value c": "5", "value d": "5"}
    kept = {f"grow {path}": ["x", "y", "z", "w"] for path in "abcd"}
    decoder = scripted(level | kept | {f"value {path}/{end}": "4" for path in "abcd" for end in "xyzw"})
    solution = grow(letters, decoder, thoughts=4, breadth=breadth)
    assert decoder.prompts[2] == [f"grow {path}" for path in expanded]
    assert decoder.prompts[4] == ["answer b/x"]  # all leaves have the same value: the first one wins
    assert len(solution.tree) == 1 + 4 + 4 * breadth


@pytest.mark.parametrize("depth", [1, 2, 3, 4])
def test_depth_t_expands_t_minus_1_levels_and_then_asks_for_one_answer(
    letters: Any, scripted: Any, depth: int, grow: Callable[..., Solution]
) -> None:
    chain = "/".join("a" * (depth - 1))
    ever_a = {f"grow {'/'.join('a' * level)}".strip(): ["a"] for level in range(depth)}
    decoder = scripted(ever_a | {f"value {'/'.join('a' * level)}": "6" for level in range(1, depth)})
    solution = grow(letters, decoder, thoughts=1, breadth=1, depth=depth)
    purposes = [batch[0].purpose for batch in decoder.batches]
    assert purposes == ["generate", "evaluate"] * (depth - 1) + ["answer"]
    assert max(node.depth for node in solution.tree) == depth - 1
    assert solution.answer == f"answer {chain}".strip()
    assert solution.value == (6 if depth > 1 else None)


def test_the_depth_of_the_task_is_the_default(letters: Any, scripted: Any, two_levels: Any) -> None:
    decoder = scripted(two_levels)
    solution = solve(letters, "q", decoder=decoder, search=BFS(thoughts=2, breadth=2), evaluator=Value())
    assert max(node.depth for node in solution.tree) == letters.depth - 1 == 2


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


def test_a_terminal_state_can_be_replaced_by_better_states(
    final: Any, scripted: Any, grow: Callable[..., Solution]
) -> None:
    level_1 = {"grow": ["a!", "b"], "value a!": "7", "value b": "6"}
    level_2 = {"grow b": ["c", "d"], "value b/c": "9", "value b/d": "8", "answer b/c": "done"}
    decoder = scripted(level_1 | level_2)
    assert grow(final, decoder, depth=4).answer == "answer b/c/grow b/c"  # both states of level 2 rank higher
    assert grow(final, decoder, depth=3).answer == "done"


def test_the_search_ends_when_all_selected_states_are_terminal(
    final: Any, scripted: Any, grow: Callable[..., Solution]
) -> None:
    decoder = scripted({"grow": ["a!", "b!"], "value a!": "2", "value b!": "3"})
    solution = grow(final, decoder, depth=9)
    assert decoder.prompts == [["grow"], ["value a!", "value b!"], ["answer b!"]]
    assert solution.stopped is None
