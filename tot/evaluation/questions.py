"""The questions of an evaluation: rows of a data set as a task reads them, and rows that the task can't read.

Rows are streamed, so a data set may be larger than memory.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import Any

from tot.decoders.errors import OptionError, TaskError, TotError, describe
from tot.evaluation.data import Record, read
from tot.task.checked import CheckedTask
from tot.task.task import Task

_INSTANCES = re.compile(r"instances:(\d+)-(\d+)")


@dataclass(frozen=True, slots=True)
class Question:
    """A row as a question. `index` is its position in the data set from 0, counting bad and skipped rows."""

    index: int
    text: str
    reference: Any


@dataclass(frozen=True, slots=True)
class BadRow:
    """A row without a valid question: its place in the file, and the reason."""

    place: str
    reason: str


class Questions:
    """Rows `offset` to `offset + limit` of a data set. Can be iterated repeatedly."""

    def __init__(self, task: Task, source: str, limit: int | None = None, offset: int = 0) -> None:
        self._task = task
        self._source = source
        self._span = (offset, None if limit is None else offset + limit)

    def __iter__(self) -> Iterator[Question | BadRow]:
        seeds = _INSTANCES.fullmatch(self._source)
        records = self._instances(range(int(seeds[1]), int(seeds[2]) + 1)) if seeds else read(self._source)
        return (self._read(index, *record) for index, record in islice(enumerate(records), *self._span))

    def _instances(self, seeds: Iterable[int]) -> Iterator[Record]:
        """Generate the questions of seeds. Questions that repeat an earlier one are bad rows."""
        seeds_of: dict[str, int] = {}
        for seed in seeds:
            try:
                row = CheckedTask(self._task).instance(seed)
            except TaskError as error:
                yield f"seed {seed}", str(error)
                continue
            first = seeds_of.setdefault(str(row["question"]), seed)
            yield f"seed {seed}", row if first == seed else f"repeats the question of the seed {first}"

    def survey(self) -> tuple[int, list[BadRow]]:
        """Return the number of questions, and the bad rows. Raises OptionError if there is no question."""
        count, bad = 0, []
        for row in self:
            if isinstance(row, BadRow):
                bad.append(row)
            else:
                count += 1
        if not count and bad:
            raise OptionError(f"{self._source} has no valid question: {bad[0].place} {bad[0].reason}")
        if not count:
            offset = self._span[0]
            raise OptionError(f"{self._source} has no rows{f' from {offset} on' if offset else ''}: give another file")
        return count, bad

    def _read(self, index: int, place: str, row: dict[str, Any] | str) -> Question | BadRow:
        if isinstance(row, str):
            return BadRow(place, row)
        try:
            text = question_of(self._task, row)
            with _reading(row):
                return Question(index, text, self._task.reference_of(row))
        except TaskError as error:
            return BadRow(place, str(error))


def question_of(task: Task, row: dict[str, Any]) -> str:
    """Return the question in a row. Raises TaskError with the reason if the task can't read or start it."""
    with _reading(row):
        text = task.question_of(row)
        task.start(text)
        return text


def parsed_reference(task: Task, reference: Any) -> Any:
    """A reference as the task reads it: the number of a GSM8K solution, for instance."""
    try:
        parsed = task.parse_answer(reference) if isinstance(reference, str) else None
    except Exception:  # a task's own method may raise anything  # noqa: BLE001
        parsed = None
    return reference if parsed is None else parsed


@contextmanager
def _reading(row: dict[str, Any]) -> Iterator[None]:
    try:
        yield
    except KeyError as error:
        raise TaskError(f"has no {error} (it has {', '.join(map(str, row)) or 'nothing'})") from None
    except TotError as error:
        raise TaskError(f"is not a valid question: {error}") from None
    except Exception as error:  # a task's own code may raise anything  # noqa: BLE001
        raise TaskError(f"can't be read by the task: {describe(error)}") from None
