"""Dataset: convert rows to questions and references, and generate questions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from tot.decoders.errors import TaskError


class Dataset:
    """Reader of a task's data set. By default rows have a `question` and an `answer`."""

    data_set: ClassVar[str] = ""
    """Default source of questions for `tot eval`: a file, `org/name:split` on the hub, or a file of an installed
    package, `package:name/file`."""

    def data(self, name: str) -> Any:
        """Return the JSON file `name` from the task's template folder. Raises TaskError if it is missing."""
        raise TaskError(f"{type(self).__name__} has no file {name}.json")

    def example(self) -> str:
        """Return a sample question: the first in the `questions` file."""
        return self.question_of(self.data("questions")[0])

    def question_of(self, row: Mapping[str, Any]) -> str:
        """Return the question of a row: by default its `question`. Raises TaskError if it is not text."""
        return text_of(row["question"])

    def reference_of(self, row: Mapping[str, Any]) -> Any:
        """Return the reference to score answers against: by default the row's `answer`."""
        return row["answer"]

    def solution_of(self, row: Mapping[str, Any]) -> str:
        """Return a row's solution, as text that continues the prompt of `chain`: by default its `solution`.

        Any model may have written it. Raises TaskError if it is missing.
        """
        if "solution" not in row:
            raise TaskError(f"task {type(self).__name__} has no solutions: give rows with a `solution`")
        return str(row["solution"])

    def instance(self, seed: int) -> dict[str, Any]:
        """Generate a row from a seed. By default raises TaskError: the task has no generator."""
        raise TaskError(f"task {type(self).__name__} can't generate questions: override `instance`")


def text_of(value: Any, what: str = "question") -> str:
    """Return a row's value as text. Raises TaskError for a list, a mapping, a boolean or NaN."""
    if isinstance(value, bool) or not isinstance(value, str | int | float) or value != value:
        raise TaskError(f"its {what} is {value!r:.60}, not text: give text in quotation marks")
    return str(value)
