"""Multiple choice: all row formats, real rows, and which letters of a reply are the answer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tot.decoders.errors import TaskError
from tot.tasks.multiple_choice import MultipleChoice, options
from tot.tree.thought import State

TASK = MultipleChoice()
QUESTION = "How far?\nA) 5 km\nB) 6 km\nC) 7 km"


@pytest.fixture(scope="module")
def rows(data: Path) -> list[dict[str, Any]]:
    text = (data / "aqua_dev.jsonl").read_text(encoding="utf-8")
    return [json.loads(line) for line in text.split("\n") if line]


# -- rows -------------------------------------------------------------------------------------------------------

AQUA = {"question": "How far?", "options": ["A)5 km", "B) 6  km", "C)7 km"], "correct": "B"}
PUBLISHED = {
    "answerKey": "B",
    "question": {
        "stem": "How far?",
        "choices": [
            {"label": "A", "text": "5 km"},
            {"label": "B", "text": "6 km"},
            {"label": "C", "text": "7 km"},
        ],
    },
}
HUB = {
    "question": "How far?",
    "choices": {"label": ["A", "B", "C"], "text": ["5 km", "6 km", "7 km"]},
    "answerKey": "B",
}
NUMBERED = {**HUB, "choices": {"label": ["1", "2", "3"], "text": ["5 km", "6 km", "7 km"]}, "answerKey": "2"}
BARE = {"question": "How far?", "options": ["5 km", "6 km", "7 km"], "answer": "b"}
TYPED = {"question": QUESTION, "answer": "B"}
MMLU = {"question": "How far?", "subject": "distances", "choices": ["5 km", "6 km", "7 km"], "answer": 1}
MEDQA = {
    "question": "How far?",
    "options": {"A": "5 km", "B": "6 km", "C": "7 km"},
    "answer": "6 km",
    "answer_idx": "B",
    "meta_info": "step1",
}
KEYED = {
    "question": "How far?",
    "options": [{"key": "A", "value": "5 km"}, {"key": "B", "value": "6 km"}, {"key": "C", "value": "7 km"}],
    "answer": "6 km",
}
OPENBOOKQA = {"question_stem": "How far?", "choices": HUB["choices"], "answerKey": "B"}


@pytest.mark.parametrize("row", [AQUA, PUBLISHED, HUB, NUMBERED, BARE, TYPED, MMLU, MEDQA, KEYED, OPENBOOKQA])
def test_every_row_format_gives_the_same_text_and_label(row: dict[str, Any]) -> None:
    assert TASK.question_of(row) == QUESTION
    assert TASK.reference_of(row) == "B"
    assert options(TASK.question_of(row)) == {"A": "5 km", "B": "6 km", "C": "7 km"}


@pytest.mark.parametrize(("answer", "label"), [(True, "A"), (False, "B")])
def test_a_yes_or_no_question_gets_the_options_yes_and_no(answer: bool, label: str) -> None:
    row = {"question": "Could it fly?", "answer": answer, "facts": ["It has wings."]}
    assert TASK.question_of(row) == "Could it fly?\nA) Yes\nB) No"
    assert TASK.reference_of(row) == label


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"options": ["A)1", "B)2"]}, "has no question: give its text as `question`"),
        ({"question": {"text": "How?"}}, "has no question"),
        ({"question": "How?", "options": 5}, "the options '5' have an unknown format: give a list"),
        ({"question": "How?", "options": ["x"] * 27}, "the row has 27 options: give at most 26"),
        ({"question": "How?", "choices": "AB"}, "the options 'AB' have an unknown format"),
    ],
)
def test_an_unknown_row_format_is_rejected(row: dict[str, Any], message: str) -> None:
    with pytest.raises(TaskError, match=message):
        TASK.question_of(row)


@pytest.mark.parametrize("right", [{}, {"answerKey": ""}, {"correct": "D"}, {"answer": None}])
def test_a_row_without_a_correct_option_has_no_reference(right: dict[str, Any]) -> None:
    with pytest.raises(TaskError, match="does not name its correct option: give its label"):
        TASK.reference_of({"question": "How far?", "options": ["A)5", "B)6"], **right})


def test_all_real_rows_render_parse_and_score(rows: list[dict[str, Any]]) -> None:
    assert len(rows) == 254
    for row in rows:
        question, reference = TASK.question_of(row), TASK.reference_of(row)
        state = TASK.start(question)
        assert state.question == question.strip()
        assert state.world is None
        assert question.startswith(row["question"].strip())
        labels = options(state.question)
        assert [f"{label}){text}".replace(" ", "") for label, text in labels.items()] == [
            "".join(option.split()) for option in row["options"]
        ]
        assert reference == row["correct"]
        assert [TASK.score(label, reference) for label in labels] == [float(label == reference) for label in labels]
        assert question in TASK.prompt("answer", state)[0].content


def test_answers_of_real_rationales_are_never_misread(rows: list[dict[str, Any]]) -> None:
    """The other 14 rationales name no option, except two whose last letter follows a sum."""
    read = [(TASK.parse_answer(row["rationale"]), row["correct"]) for row in rows]
    assert [pair for pair in read if pair[0] not in (None, pair[1])] == []
    assert sum(answer == right for answer, right in read) == 240


# -- questions --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        QUESTION,
        "How far?\n\n  (A) 5 km\n  (B) 6 km\n  (C) 7 km\n",
        "How far?\na. 5 km\nb. 6 km\nc. 7 km",
        "How far?\nA: 5 km\nB: 6  km\nC: 7 km",
    ],
)
def test_options_may_be_marked_in_several_ways(text: str) -> None:
    assert TASK.start(text).question == QUESTION


def test_lines_with_other_marks_belong_to_the_question() -> None:
    question = "Which holds?\nI. one\nX. two\nA) I only\nB) X only"
    assert TASK.start(question).question == question
    assert options(question) == {"A": "I only", "B": "X only"}


@pytest.mark.parametrize(
    ("question", "message"),
    [
        ("How far?", "the question 'How far\\?' ends in 0 options: write the question, then two or more options"),
        ("How far?\nA) 5", "ends in 1 options"),
        ("A) 5\nB) 6\nHow far?", "ends in 0 options"),
        ("How far?\nA) 5\nB)\n", "ends in 0 options"),
        ("How far?\nA) 5\na) 6", "has several options A"),
        ("A) 5\nB) 6", "there is no question before the option A\\) '5'"),
        ("", "the question is empty"),
    ],
)
def test_a_question_without_valid_options_is_rejected(question: str, message: str) -> None:
    with pytest.raises(TaskError, match=message):
        TASK.start(question)


# -- answers ----------------------------------------------------------------------------------------------------


def test_equal_labels_are_the_same_vote() -> None:
    assert {TASK.canonical(answer) for answer in ("b", " B ", "(B)", "B.")} == {"B"}


def test_the_choices_are_the_labels() -> None:
    assert TASK.choices(TASK.start(QUESTION)) == ("A", "B", "C")


# -- prompts ----------------------------------------------------------------------------------------------------


def test_the_demonstrations_have_the_format_that_is_parsed() -> None:
    head = TASK.prompt("answer", State(question=QUESTION))[0].content
    for row in TASK.prompts.data("demonstrations"):
        written = f"Question: {TASK.question_of(row)}\nRationale: {row['rationale']}\nAnswer: {row['correct']}\n\n"
        assert written in head
        assert row["correct"] in options(TASK.question_of(row))
        assert "\n" not in row["rationale"]


def test_only_an_announced_label_counts_in_a_truncated_reply() -> None:
    assert TASK.parse_truncated("Option B looks right, and (C)") is None
    assert TASK.parse_truncated("The answer is B. Some may") == "B"
    assert TASK.parse_truncated(r"so \boxed{B}") == "B"


@pytest.mark.parametrize("empty", ["", " ", None, float("nan")])
def test_an_empty_option_is_rejected(empty: object) -> None:
    with pytest.raises(TaskError, match="empty option B"):
        TASK.question_of({"question": "Which?", "options": ["x", empty, "y"], "correct": "A"})


@pytest.mark.parametrize(
    "stem", ["All cats are black.\nQ) Some cats are black.", "Given that\nX) it rains\ni) it is wet"]
)
def test_a_line_of_the_question_that_looks_like_an_option_is_not_one(stem: str) -> None:
    question = TASK.start(TASK.question_of({"question": stem, "options": ["yes", "no"]})).question
    assert options(question) == {"A": "yes", "B": "no"}
    assert question.startswith(stem)


@pytest.mark.parametrize("right", [2, -1, "D", "17", ["A"]])
def test_a_correct_option_that_is_missing_in_the_question_is_rejected(right: object) -> None:
    with pytest.raises(TaskError, match="does not name its correct option"):
        MultipleChoice().reference_of({"question": "Which?\nA) 15\nB) 16", "answer": right})


@pytest.mark.parametrize("right", ["B", "b", "(B)", "B)", "B."])
def test_the_correct_option_may_have_the_marks_of_a_label(right: str) -> None:
    for row in ({"question": "Which?\nA) 15\nB) 16"}, {"question": "Which?", "options": ["15", "16"]}):
        assert MultipleChoice().reference_of({**row, "answer": right}) == "B"


def test_an_option_that_is_a_list_is_rejected() -> None:
    with pytest.raises(TaskError, match=r"the option \[1\] is not text"):
        MultipleChoice().question_of({"question": "Which?", "options": [[1], [2]], "correct": "A"})
