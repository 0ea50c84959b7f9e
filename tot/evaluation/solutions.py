"""Questions of tasks as requests for whole solutions, for training and measuring decoders."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from tot.decoders.errors import OptionError
from tot.decoders.request import Request, Sampling
from tot.evaluation.data import rows
from tot.registry import load_task
from tot.task.checked import CheckedTask

NO_QUESTIONS = "there are no questions: give --questions TASK=FILE, with more rows than --offset"


class Asked(NamedTuple):
    """A request for the whole solution of a row's question."""

    request: Request
    task: CheckedTask
    row: dict[str, Any]


def solutions(sources: Sequence[str], max_tokens: int) -> Iterator[Asked]:
    """Yield greedy requests for whole solutions (a task's `chain` template), from "task=file" pairs.

    Raises OptionError for an invalid pair or row, and TaskError for a task without the template.
    """
    for source in sources:
        name, equals, path = source.partition("=")
        if not equals:
            raise OptionError(f"--questions {source!r} can't be read: write TASK=FILE, such as gsm8k=train.jsonl")
        task = load_task(name)
        checked = CheckedTask(task)
        for row in rows(path):
            try:
                question = task.question_of(row)
            except KeyError as error:
                raise OptionError(
                    f"{path} has a row without {error} (it has {', '.join(row)}): give a file of {name} questions"
                ) from None
            limits = {"max_tokens": max_tokens, **checked.sampling.get("chain", {})}
            sampling = Sampling(**{**limits, "max_tokens": min(max_tokens, int(limits["max_tokens"]))})
            yield Asked(
                Request(prompt=checked.prompt("chain", checked.start(question)), sampling=sampling), checked, row
            )
