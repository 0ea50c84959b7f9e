"""The benchmark `calls`: the check of calls, and its table on made-up questions in the format of the BFCL."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.__main__ import main
from benchmarks.calls import Options, _questions, is_right

RIGHT = {"garden.plan": {"rows": [3], "width": [1.5, 2], "plants": [["Bean", "leek"]], "site": [{"sun": [True]}, ""]}}
ROWS = [
    {
        "id": f"simple_python_{i}",
        "question": [[{"role": "user", "content": "Plan a garden of 3 rows of beans and leeks, 1.5 m wide."}]],
        "function": [
            {
                "name": "garden.plan",
                "description": "Plan a garden.",
                "parameters": {
                    "type": "dict",
                    "properties": {
                        "rows": {"type": "integer"},
                        "width": {"type": "float"},
                        "plants": {"type": "array", "items": {"type": "string"}},
                        "site": {"type": "dict", "properties": {"sun": {"type": "boolean"}}},
                    },
                    "required": ["rows", "width", "plants"],
                },
            }
        ],
    }
    for i in range(2)
]


@pytest.fixture
def data(tmp_path: Path) -> Path:
    (tmp_path / "possible_answer").mkdir()
    answers = [{"id": row["id"], "ground_truth": [RIGHT]} for row in ROWS]
    for rows, folder in ((ROWS, tmp_path), (answers, tmp_path / "possible_answer")):
        (folder / "BFCL_v4_simple_python.json").write_text("\n".join(map(json.dumps, rows)))
    return tmp_path


@pytest.mark.parametrize(
    ("changes", "right"),
    [
        ({}, True),
        ({"width": 2}, True),
        ({"plants": ["bean ", "Leek"]}, True),
        ({"site": {"sun": True}}, True),
        ({"site": {"sun": False}}, False),
        ({"site": ""}, False),
        ({"rows": 3.0}, False),
        ({"rows": "3"}, False),
        ({"width": 3}, False),
        ({"plants": ["bean"]}, False),
        ({"colour": "red"}, False),
        ({"rows": None}, False),
    ],
)
def test_a_call_is_right_if_each_argument_is_a_possible_one(data: Path, changes: dict[str, Any], right: bool) -> None:
    question, _ = _questions(Options(data=data, skip=0), "simple_python")
    arguments = {"rows": 3, "width": 1.5, "plants": ["bean", "leek"], **changes}
    call = ("garden_plan", json.dumps({name: value for name, value in arguments.items() if value is not None}))
    assert is_right([call], question) == right
    assert not is_right([call, call], question)
    assert not is_right([], question)
    assert not is_right([("garden_plan", call[1][:-1])], question)


def test_sides_are_compared_on_the_questions_of_a_folder(
    data: Path, smollm2: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--model", smollm2, "--data", str(data), "--categories", "simple_python", "--skip", "0", "--samples", "2"]
    assert main(["calls", *words, "--markdown"]) == 0
    table = capsys.readouterr().out
    for side in ("one answer, constrained", "one answer, free", "vote of 2, T = 0.7"):
        row, by_category = (line for line in table.splitlines() if line.startswith(f"| {side}"))
        assert row.count("%") >= 3
        assert by_category.count("%") == 1
    assert "template's form" not in table  # the model has no template with tools


def test_a_folder_without_the_files_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["calls", "--data", str(tmp_path)]) == 2
    assert "give --data with the files of bfcl-eval" in capsys.readouterr().err
