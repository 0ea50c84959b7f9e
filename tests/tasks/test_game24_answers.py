"""Answers to the Game of 24: expressions in text and LaTeX, and their scores."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from tot.tasks.game24 import Game24
from tot.tree.thought import State, Thought

TASK = Game24()


def solution_of(state: State) -> str | None:
    """Return an expression for 24 by exhaustive search, or None if the puzzle has no solution."""
    if TASK.is_terminal(state):
        return TASK.answer_at(state)
    reached = (TASK.step(state, Thought(parts={"move": move})) for move in TASK.actions(state))
    return next(filter(None, (solution_of(one) for one in reached if one is not None)), None)


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("Answer: (13 - 9) * (10 - 4) = 24", "(13 - 9) * (10 - 4)"),
        (" (13 - 9) * (10 - 4) = 24.", "(13 - 9) * (10 - 4)"),
        ("13 - 9 = 4\n10 - 4 = 6\nAnswer: (13 - 9) × (10 − 4) = 24\nGood.", "(13 - 9) * (10 - 4)"),
        ("**Answer: 24 = 4 x 6**", "4 * 6"),
        ("The answer is:\n4 * 6", "4 * 6"),
        ("Answer: 4 * 7\nAnswer: 4 * 6", "4 * 6"),
        ("Move 3: 4 * 6 = 24", "4 * 6"),
        ("Move 3: 4 * 6 = 24\nAnswer: I do not know", None),
        ("Answer: 24", None),
        ("Answer: none (I tried)", None),
        ("", None),
    ],
)
def test_the_answer_is_the_announced_expression(text: str, answer: str | None) -> None:
    assert TASK.parse_answer(text) == answer


@pytest.mark.parametrize(
    ("answer", "right"),
    [
        ("(13 - 9) * (10 - 4)", True),
        ("(13-9)×(10−4)", True),
        ("(10 - 4) * (13 - 9)", True),
        ("(13 - 9) * 6", False),  # 6 is not one of the numbers
        ("13 + 10 + 4 - 9", False),  # 18
        ("(13 - 9) * (10 - 4) + 9 - 9", False),  # 9 three times
        ("4 * 6", False),
        ("24", False),
        ("(13 - 9) * (10 - 4", False),
        ("(13 - 9) * (10 - 4) = 24", False),  # an equation, not an expression
        ("13 - 9 10 4", False),
        ("", False),
        (None, False),
        (24, False),
    ],
)
def test_a_correct_answer_uses_each_number_once_and_equals_24(answer: object, right: bool) -> None:
    assert TASK.verify("4 9 10 13", answer) is right
    assert TASK.score(answer, "4 9 10 13") == float(right)


def test_a_repeated_number_is_used_twice_and_digits_are_not_joined() -> None:
    assert TASK.verify("4 4 4 4", "4 * 4 + 4 + 4")
    assert not TASK.verify("4 4 4 4", "4 * (4 + 4 / 2)")
    assert not TASK.verify("1 2 12 1", "12 + 12")
    assert TASK.verify("1.5 16", "1.5 * 16")
    assert not TASK.verify("3 2 16", "1.5 * 16")
    assert not TASK.verify("a b", "24 + 0")


def test_rows_of_the_data_set_are_puzzles_and_answers_are_scored_by_their_numbers(data: Path) -> None:
    with (data / "game24.csv").open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 1362
    solved = 0
    for row in rows[::40]:
        question = TASK.question_of(row)
        assert TASK.start(question).question == row["Puzzles"]
        answer = solution_of(TASK.start(question))
        solved += TASK.score(answer, TASK.reference_of(row)) == 1
        assert TASK.score("1 + 23", TASK.reference_of(row)) == 0
    assert solved == len(rows[::40])
