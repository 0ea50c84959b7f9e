"""Elections: a task may compare the answers of a vote itself; invalid elections are errors that name the method."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from tot import BFS, Solution, Value, solve
from tot.decoders import TaskError
from tot.search.votes import count
from tot.task.checked import CheckedTask
from tot.task.world import HasElection

FOUR = {"grow": ["a", "b", "c", "d"], "value a": "9", "value b": "5", "value c": "6", "value d": "2"}
ANSWERS = {"answer a": "10", "answer b": "21", "answer c": "22", "answer d": "11"}


def by_first_letter(self: Any, question: str, answers: Sequence[Any], weights: Sequence[float]) -> Any:
    assert (question, sorted(weights)) == ("q", [2, 5, 6, 9])
    return [answer[0] for answer in answers], answers.index("22")


def grow(letters: Any, scripted: Any, elect: Callable[..., Any]) -> Solution:
    task = type("Electing", (letters,), {"elect": elect})
    search = BFS(thoughts=4, breadth=4, depth=2, aggregate="vote")
    return solve(task, "q", decoder=scripted(FOUR | ANSWERS), search=search, evaluator=Value())


def test_a_task_groups_and_elects_the_answers(letters: Any, scripted: Any) -> None:
    solution = grow(letters, scripted, by_first_letter)
    assert (solution.answer, solution.votes) == ("22", (2, 4))
    shares = {node.answer: node.share for node in solution.tree if node.answer}
    assert shares == {"10": 0.5, "11": 0.5, "21": 0.5, "22": 0.5}


def test_without_elections_the_answer_with_most_weight_wins(letters: Any) -> None:
    assert not isinstance(letters(), HasElection)
    keys, winners = count(CheckedTask(letters()), "q", ["1", " 2", "2 "], [3.0, 1.0, 1.0])
    assert (keys, winners) == (["1", "2", "2"], [0])


def test_the_elected_answer_is_the_first_winner(letters: Any) -> None:
    task = type("Last", (letters,), {"elect": lambda *_: ("aba", 2)})()
    assert count(CheckedTask(task), "q", ["1", "2", "3"], [1.0] * 3) == (["a", "b", "a"], [2, 0])
    assert count(CheckedTask(task), "q", [], []) == ([], [])


@pytest.mark.parametrize(
    ("result", "remedy"),
    [
        (None, "return a list of hashable keys and an index"),
        (([[1], [2], [3], [4]], 0), "return a list of hashable keys and an index"),
        (("abcd", 4), "return a list of hashable keys and an index"),
        (("abcd", None), "return a list of hashable keys and an index"),
        (("abc", 0), "return one key for each of the 4 answers"),
    ],
)
def test_invalid_elections_are_refused(letters: Any, scripted: Any, result: Any, remedy: str) -> None:
    with pytest.raises(TaskError, match=rf"Electing\.elect gave .*: {remedy}"):
        grow(letters, scripted, lambda *_: result)
    with pytest.raises(TaskError, match=r"Electing\.elect raised ZeroDivisionError: .*: fix the task"):
        grow(letters, scripted, lambda *_: 1 // 0)
