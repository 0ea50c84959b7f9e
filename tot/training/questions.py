"""Questions of tasks for training and measuring, read on demand."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from tot.decoders.errors import OptionError, TaskError
from tot.decoders.request import Request, Sampling
from tot.evaluation.data import rows
from tot.registry import load_task
from tot.task.checked import CheckedTask
from tot.task.task import Task

NOTHING_TO_ASK = "there are no questions: give --questions TASK=FILE, with more rows than --offset"


def rows_of_task(source: str, scored: bool = False) -> Iterator[tuple[Task, str, Any, dict[str, Any]]]:
    """Yield (task, question, reference, row) for each row of a "task=file" pair. The reference is None unless `scored`.

    Raises OptionError for an invalid pair or a row without the task's fields.
    """
    name, equals, path = source.partition("=")
    if not equals:
        raise OptionError(f"--questions {source!r} can't be read: write TASK=FILE, such as gsm8k=train.jsonl")
    task = load_task(name)
    for row in rows(path):
        try:
            question, reference = task.question_of(row), task.reference_of(row) if scored else None
        except KeyError as error:
            raise OptionError(
                f"{path} has a row without {error} (it has {', '.join(row)}): give a file of {name} questions"
            ) from None
        yield task, question, reference, row


@dataclass(frozen=True)
class TrainingQuestion:
    """A request, and functions that parse, compare and score its answers."""

    request: Request
    solution: str | None
    """The row's own solution, if requested."""
    answer: Callable[[str], Any]
    same: Callable[[Any], Hashable]
    score: Callable[[Any], float]


def questions_of(questions: Sequence[str], max_tokens: int, solutions: bool = False) -> Iterator[TrainingQuestion]:
    """Yield greedy requests for whole solutions (a task's `chain` template), from "task=file" pairs.

    `solutions` adds the rows' own solutions. Raises OptionError for an invalid pair, and TaskError for a task without
    the template or a row without a solution.
    """
    for source in questions:
        for given, question, reference, row in rows_of_task(source, scored=True):
            task = CheckedTask(given)
            limits = {"max_tokens": max_tokens, **task.sampling.get("chain", {})}
            limits["max_tokens"] = min(max_tokens, int(limits["max_tokens"]))
            yield TrainingQuestion(
                Request(prompt=task.prompt("chain", task.start(question)), sampling=Sampling(**limits)),
                _solution_of(given, row) if solutions else None,
                task.parse_answer,
                task.canonical,
                lambda answer, task=task, reference=reference: task.score(answer, reference),  # type: ignore[misc]
            )


def _solution_of(task: Task, row: dict[str, Any]) -> str:
    if "solution" not in row:
        raise TaskError(f"a row of {type(task).__name__} has no solution: give rows with a `solution`")
    return str(row["solution"])
