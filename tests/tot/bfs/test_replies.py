"""BFS: unusable and repeated replies."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tot import Solution


def test_equal_thoughts_of_a_state_are_one_node_evaluated_once(
    letters: Any, scripted: Any, grow: Callable[..., Solution], values: Callable[..., dict[str, float | None]]
) -> None:
    children = {
        "grow a": ["x", "y", "x"],
        "grow b": ["x", "x", "x"],
        "value a/x": "6",
        "value a/y": "1",
        "value b/x": "5",
    }
    decoder = scripted({"grow": ["a", "b", "a"], "value a": "7", "value b": "6"} | children)
    solution = grow(letters, decoder, thoughts=3, breadth=3)
    assert decoder.prompts[1] == ["value a", "value b"]
    assert decoder.prompts[3] == ["value a/x", "value a/y", "value b/x"]
    assert values(solution.tree) == {"a": 7, "b": 6, "a/x": 6, "a/y": 1, "b/x": 5}
    assert [node.merged for node in solution.tree] == [0, 1, 0, 1, 0, 2]
    assert [node.prior for node in solution.tree][1:] == pytest.approx([2 / 3, 1 / 3, 2 / 3, 1 / 3, 1])
    assert [node.usage.new_tokens for node in solution.tree][1:4] == [
        15,
        10,
        15,
    ]
    assert sum(node.usage.new_tokens for node in solution.tree) + 5 == solution.usage.new_tokens


def test_without_any_parsed_thought_the_answer_is_asked_at_the_root(
    letters: Any, scripted: Any, grow: Callable[..., Solution]
) -> None:
    decoder = scripted({"grow": ["", ""], "answer": "guess"})
    solution = grow(letters, decoder)
    assert decoder.prompts == [["grow"], ["answer"]]
    assert (solution.answer, solution.value, len(solution.tree)) == ("guess", None, 1)


@pytest.mark.parametrize("reply", ["", "no idea", "eleven", "0", "11 of 12"])
def test_an_unparsed_value_is_the_default_and_is_counted(
    letters: Any,
    scripted: Any,
    reply: str,
    grow: Callable[..., Solution],
    two_levels: Any,
    values: Callable[..., dict[str, float | None]],
) -> None:
    careful = type("Careful", (letters,), {"scale": (0.5, 10)})
    decoder = scripted(two_levels | {"value a": reply, "value b/d": reply})
    solution = grow(careful, decoder)
    assert values(solution.tree) == {"a": 0.5, "b": 7, "b/c": 2, "b/d": 0.5, "a/e": 9, "a/f": 5}
    assert solution.parse_failures == 2
    assert [node.parse_failures for node in solution.tree] == [0, 1, 0, 0, 1, 0, 0]
    assert (solution.answer, solution.stopped) == ("answer a/e", None)
