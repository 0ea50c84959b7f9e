"""BFS: unusable and repeated replies."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tot import Solution, Task


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
    assert [node.new_tokens for node in solution.tree][1:4] == [15, 10, 15]  # two samples and a value; one and one
    assert sum(node.new_tokens for node in solution.tree) + 5 == solution.usage.new_tokens  # 5: the answer's tokens


def test_a_state_that_recurs_at_another_level_is_not_evaluated_again(
    letters: Any, scripted: Any, grow: Callable[..., Solution], values: Callable[..., dict[str, float | None]]
) -> None:
    last_only = type("LastOnly", (letters,), {"templates": letters.templates | {"value": "value {{ thought }}"}})
    table = {
        "grow": ["a", "b"],
        "grow a": ["b", "c"],
        "grow b": ["a", "b"],
        "value a": "3",
        "value b": "7",
        "value c": "1",
    }
    decoder = scripted(table)
    solution = grow(last_only, decoder)
    evaluated = [request.prompt[-1].content for request in decoder.requests if request.purpose == "evaluate"]
    assert evaluated == ["value a", "value b", "value c"]
    assert values(solution.tree) == {"a": 3, "b": 7, "b/a": 3, "b/b": 7, "a/b": 7, "a/c": 1}
    assert grow(last_only, decoder).value == 7
    assert sum(request.purpose == "evaluate" for request in decoder.requests) == 6  # once a search, not once a process


def test_a_rejected_thought_is_dropped_and_counted(
    letters: Any, scripted: Any, grow: Callable[..., Solution], values: Callable[..., dict[str, float | None]]
) -> None:
    decoder = scripted({"grow": ["  ", "b", "\n"], "value b": "4"})
    solution = grow(letters, decoder, thoughts=3, depth=2)
    assert values(solution.tree) == {"b": 4}
    assert solution.parse_failures == solution.tree.root.parse_failures == 2
    assert solution.stopped is None


def test_the_task_can_reject_thoughts(
    letters: Any, scripted: Any, grow: Callable[..., Solution], values: Callable[..., dict[str, float | None]]
) -> None:
    def parse_thought(self: Task, template: str, text: str) -> str | None:
        return text.upper() if template == "thought" and text != "b" else None

    shouting = type("Shouting", (letters,), {"parse_thought": parse_thought})
    solution = grow(shouting, scripted({"grow": ["a", "b"], "value A": "4"}), depth=2)
    assert values(solution.tree) == {"A": 4}
    assert solution.parse_failures == 1


@pytest.mark.parametrize("empty", [["", ""], ["\t", " "]])
def test_if_all_thoughts_are_rejected_the_search_ends_with_the_best_so_far(
    letters: Any, scripted: Any, empty: list[str], grow: Callable[..., Solution]
) -> None:
    decoder = scripted({"grow": ["a", "b"], "value a": "3", "value b": "7", "grow b": empty, "answer b": "so far"})
    solution = grow(letters, decoder, breadth=1, depth=9)
    assert decoder.prompts == [["grow"], ["value a", "value b"], ["grow b"], ["answer b"]]
    assert (solution.answer, solution.value, solution.parse_failures) == ("so far", 7, 2)


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
    careful = type("Careful", (letters,), {"default_value": 2.5})
    decoder = scripted(two_levels | {"value a": reply, "value b/d": reply})
    solution = grow(careful, decoder)
    assert values(solution.tree) == {"a": 2.5, "b": 7, "b/c": 2, "b/d": 2.5, "a/e": 9, "a/f": 5}
    assert solution.parse_failures == 2
    assert [node.parse_failures for node in solution.tree] == [0, 1, 0, 0, 1, 0, 0]
    assert (solution.answer, solution.stopped) == ("answer a/e", None)
