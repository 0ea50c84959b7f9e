"""The questions of an evaluation: rows of a data set as a task reads them, and the rows that it can't read.

Rows are read as they are wanted, so a data set may be larger than memory; only a shuffled choice is held.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import Any

from tot.decoders.errors import OptionError, TaskError, TotError
from tot.evaluation.data import read
from tot.task.task import Task

_Row = tuple[int, str, dict[str, Any] | OptionError]


@dataclass(frozen=True, slots=True)
class Question:
    """A row that can be asked. `index` counts rows from 0, bad ones included, whatever is left out before."""

    index: int
    text: str
    reference: Any


@dataclass(frozen=True, slots=True)
class BadRow:
    """A row that can't be, with its place in the file and why."""

    place: str
    reason: str


class Questions:
    """Rows `offset` to `offset + limit` of a data set, in its order or shuffled by a seed; iterable again."""

    def __init__(
        self,
        task: Task,
        source: str,
        limit: int | None = None,
        offset: int = 0,
        shuffle_seed: int | None = None,
        columns: Mapping[str, str] | None = None,
    ) -> None:
        """`columns` has the file's names of columns by those that tasks read."""
        self._task = task
        self._source = source
        self._columns = columns or {}
        self._span = (offset, None if limit is None else offset + limit)
        self._shuffled = None if shuffle_seed is None else self._drawn(shuffle_seed)

    def __iter__(self) -> Iterator[Question | BadRow]:
        rows = islice(self._rows(), *self._span) if self._shuffled is None else iter(self._shuffled)
        return (self._read(*row) for row in rows)

    def survey(self) -> tuple[int, list[BadRow]]:
        """How many can be asked, and the bad rows. Raises OptionError where there is nothing to ask."""
        found, bad = 0, []
        for each in self:
            if isinstance(each, BadRow):
                bad.append(each)
            else:
                found += 1
        if not found and bad:
            raise OptionError(f"{self._source} has no row that can be asked: {bad[0].place} {bad[0].reason}")
        if not found:
            offset = self._span[0]
            raise OptionError(f"{self._source} has no rows{f' from {offset} on' if offset else ''}: give another file")
        return found, bad

    def _rows(self) -> Iterator[_Row]:
        return ((index, place, row) for index, (place, row) in enumerate(read(self._source)))

    def _drawn(self, seed: int) -> list[_Row]:
        count = sum(1 for _ in self._rows())
        order = random.Random(seed).sample(range(count), count)[slice(*self._span)]
        wanted = set(order)
        found = {row[0]: row for row in self._rows() if row[0] in wanted}
        return [found[index] for index in order]

    def _read(self, index: int, place: str, row: dict[str, Any] | OptionError) -> Question | BadRow:
        if isinstance(row, OptionError):
            return BadRow(place, str(row).rpartition(f"{place} ")[2])
        try:
            row = renamed(row, self._columns)
            text = question_of(self._task, row)
            with _reading(row):
                return Question(index, text, self._task.reference_of(row))
        except TaskError as error:
            return BadRow(place, str(error))


def question_of(task: Task, row: dict[str, Any]) -> str:
    """The question in a row. Raises TaskError, saying what is wrong with the row, where the task can't ask it."""
    with _reading(row):
        text = task.question_of(row)
        task.start(text)
        return text


def renamed(row: dict[str, Any], columns: Mapping[str, str]) -> dict[str, Any]:
    """A row with the values of some columns under other names. Raises TaskError if one is missing."""
    with _reading(row):
        return {**row, **{name: row[column] for name, column in columns.items()}}


@contextmanager
def _reading(row: dict[str, Any]) -> Iterator[None]:
    try:
        yield
    except KeyError as error:
        raise TaskError(f"has no {error} (it has {', '.join(map(str, row)) or 'nothing'})") from None
    except TotError as error:
        raise TaskError(f"can't be asked: {error}") from None
    except Exception as error:  # a task's own reading of a row  # noqa: BLE001
        raise TaskError(f"can't be read by the task: {type(error).__name__}: {error}") from None
