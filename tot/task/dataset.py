"""Dataset: how rows become questions and references, and how questions are made up."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from tot.decoders.errors import TaskError


class Dataset:
    """The rows of a task: every task can read rows with a `question` and an `answer`."""

    data_set: ClassVar[str] = ""
    """Where `tot eval` finds questions, unless it is told: a file, `org/name:split` on the hub, or a file of a package
    that is installed, `package:name/file`."""

    def data(self, name: str) -> Any:
        """The JSON file `name` beside the task's templates; a Task finds it. Raises TaskError if there is none."""
        raise TaskError(f"{type(self).__name__} has no file {name}.json")

    def example(self) -> str:
        """A question to try the task with: the first of its `questions` file."""
        return self.question_of(self.data("questions")[0])

    def question_of(self, row: Mapping[str, Any]) -> str:
        """The question in a row of a data set: by default its `question`. Raises TaskError where that is no text."""
        return text_of(row["question"])

    def reference_of(self, row: Mapping[str, Any]) -> Any:
        """What a row's answer is scored against: by default its `answer`."""
        return row["answer"]

    def solution_of(self, row: Mapping[str, Any]) -> str:
        """A row's own solution, as text that goes on after the prompt of `chain`: by default its `solution`, which may
        be any model's. Raises TaskError where there is none."""
        if "solution" not in row:
            raise TaskError(f"task {type(self).__name__} has no solutions of its own: give rows with a `solution`")
        return str(row["solution"])

    def instance(self, seed: int) -> dict[str, Any]:
        """A row made up from a seed, for tasks that can; raises TaskError by default."""
        raise TaskError(f"task {type(self).__name__} makes no instances up: override `instance`")


def text_of(value: Any, what: str = "question") -> str:
    """A row's value as the text that it is. Raises TaskError for a list, a mapping, a boolean or NaN."""
    if isinstance(value, bool) or not isinstance(value, str | int | float) or value != value:
        raise TaskError(f"its {what} is {value!r:.60}, not text: give text in quotation marks")
    return str(value)
