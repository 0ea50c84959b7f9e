"""Evaluations by label: the label that a reply names, and labels weighted by their likelihood."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest

from tot import BFS, Classify, Node, Solution, Task, solve
from tot.llm.context import Context
from tot.llm.replies import Evaluation

JUDGED = {"sure": 20.0, "likely": 1.0, "impossible": 0.001}
ONE_THOUGHT = BFS(thoughts=1, breadth=1, depth=2)


@pytest.fixture
def judged(letters: Any) -> type[Task]:
    """Letters with ToT's labels of the Game of 24."""
    return type("Judged", (letters,), {"labels": JUDGED, "scale": (0.25, 1)})


def evaluate(task: Any, decoder: Any, evaluator: Any) -> Solution:
    """A tree of one thought, "a", and the decoder's replies to "value a"."""
    return solve(task, "q", decoder=decoder, search=ONE_THOUGHT, evaluator=evaluator)


# -- Classify ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("reply", "value"),
    [
        ("sure", 20.0),
        ("LIKELY.", 1.0),
        ("impossible", 0.001),
        ("4 + 20 = 24: sure", 20.0),
        ("impossible? no: 6 * 4 = 24, sure", 20.0),  # the last one
        ("sure\nimpossible", 0.001),
        ("it is likely, not impossible", 1.0),
        ("not sure, but likely", 1.0),
        ("likely; not a sure thing", 1.0),
    ],
)
def test_the_value_is_the_last_label_of_a_reply(judged: Any, scripted: Any, reply: str, value: float) -> None:
    solution = evaluate(judged, scripted({"grow": "a", "value a": reply}), Classify())
    assert solution.tree[1].value == value
    assert solution.parse_failures == 0


@pytest.mark.parametrize("reply", ["", "24", "not sure", "Not  sure!", "surely", "unlikely", "not a likely one"])
def test_a_reply_without_a_label_is_the_default_and_counted(judged: Any, scripted: Any, reply: str) -> None:
    solution = evaluate(judged, scripted({"grow": "a", "value a": reply}), Classify())
    assert solution.tree[1].value == 0.25
    assert solution.parse_failures == solution.tree[1].parse_failures == 1


# -- values that are not numbers --------------------------------------------------------------------------------


class Broken:
    """An evaluator that gives fixed values."""

    def __init__(self, *values: float) -> None:
        self.values = values

    def key(self, ctx: Context, node: Node) -> None:
        return None

    async def evaluate(self, ctx: Context, nodes: Sequence[Node]) -> list[Evaluation]:
        return [Evaluation(value) for value in self.values[: len(nodes)]]


def test_a_value_that_is_not_a_number_is_the_default_and_counted(judged: Any, scripted: Any) -> None:
    decoder = scripted({"grow": ["a", "b", "c"]})
    search = BFS(thoughts=3, depth=2)
    solution = solve(judged, "q", decoder=decoder, search=search, evaluator=Broken(math.nan, 0.1, math.nan))
    assert [node.value for node in solution.tree] == [None, 0.25, 0.1, 0.25]
    assert [node.parse_failures for node in solution.tree] == [0, 1, 0, 1]
    assert solution.value == 0.25
