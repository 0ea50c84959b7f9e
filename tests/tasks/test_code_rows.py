"""Unusable rows of HumanEval and MBPP are rejected before any request, with the column's name."""

from __future__ import annotations

from typing import Any

import pytest

from tot import Task
from tot.decoders.errors import TaskError
from tot.tasks import MBPP, HumanEval


@pytest.mark.parametrize(
    ("task", "row", "message"),
    [
        (MBPP, {"prompt": "p", "test_imports": [], "test_list": []}, "its test_list is empty"),
        (MBPP, {"prompt": "p", "test_imports": [], "test_list": "assert 1"}, "its test_list is 'assert 1', not a list"),
        (MBPP, {"prompt": "p", "test_imports": "import re", "test_list": ["assert 1"]}, "its test_imports is 'import"),
        (MBPP, {"prompt": "p", "test_imports": [], "test_list": [5]}, r"its test_list is \[5\], not a list of texts"),
        (HumanEval, {"prompt": ["p"], "test": "t", "entry_point": "f"}, r"its prompt is \['p'\], not text"),
        (HumanEval, {"prompt": "p", "test": ["t"], "entry_point": "f"}, r"its test is \['t'\], not text"),
    ],
)
def test_a_row_with_values_that_are_not_texts_is_rejected(task: type[Task], row: dict[str, Any], message: str) -> None:
    with pytest.raises(TaskError, match=message):
        (task().question_of(row), task().reference_of(row))


def test_imports_are_optional_in_a_row() -> None:
    assert MBPP().question_of({"prompt": "p", "test_list": ["assert f(1)"]}) == "p\n\nassert f(1)"
