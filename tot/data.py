"""Rows of a data set in a local file, read through `datasets`: .jsonl, .json, .csv, .parquet, or lines of text. And
rows that a task makes up.
"""

from __future__ import annotations

import json
from collections.abc import Hashable, Iterator, Sequence
from itertools import count as numbers
from itertools import islice
from pathlib import Path
from typing import Any

from rich.console import Console

from tot.decoders.errors import OptionError, unknown
from tot.named import load_task
from tot.report.terminal import counting

_BUILDERS = {".jsonl": "json", ".json": "json", ".csv": "csv", ".parquet": "parquet", ".txt": "text"}


def rows(path: str | Path) -> Iterator[dict[str, Any]]:
    """The rows, one after another; a line of text is {"text": line}. Raises OptionError where they can't be read."""
    path = Path(path)
    builder = _BUILDERS.get(path.suffix.lower())
    if builder is None:
        raise OptionError(f"{path}: " + unknown("kind of data set", path.suffix, _BUILDERS))
    if not path.is_file():
        raise OptionError(f"{path}: there is no such file")
    from datasets import load_dataset

    try:
        yield from load_dataset(builder, data_files=str(path), split="train", streaming=True)
    except StopIteration:  # a file without rows
        return
    except Exception as error:  # whatever the reader of the format raises
        raise OptionError(f"{path} can't be read: {' '.join(str(error).split()) or type(error).__name__}") from error


def row(path: str | Path, number: int) -> dict[str, Any]:
    """Row `number`, counted from 0. Raises OptionError where there is none."""
    if number < 0:
        raise OptionError(f"{path} has no row {number}: rows are counted from 0")
    found = list(islice(rows(path), number, number + 1))
    if not found:
        raise OptionError(f"{path} has no row {number}: rows are counted from 0")
    return found[0]


def made_up(task_name: str, out: Path, count: int, seed: int, without: Sequence[Path], console: Console) -> None:
    """Write so many different questions of a task to a .jsonl file, none of which is in the files `without`.

    Raises TaskError for a task that makes none up, OptionError where it has no more.
    """
    task = load_task(task_name)

    def asked(row: Any) -> Hashable:
        """What a model is asked: questions may be written in several ways."""
        return task.prompt(task.chain, task.start(task.question_of(row)))

    seen = {asked(row) for path in without for row in rows(path)}
    made, repeated = 0, 0
    with out.open("w", encoding="utf-8") as file, counting("making up", count, console) as tell:
        for number in numbers():
            row = task.instance((seed << 32) + number)
            question = asked(row)
            repeated = repeated + 1 if question in seen else 0
            if repeated > 1000:
                raise OptionError(f"{task_name} has hardly more than the {made} questions in {out}: ask for fewer")
            if not repeated:
                seen.add(question)
                file.write(json.dumps(row, ensure_ascii=False) + "\n")
                made += 1
                tell(made, f"{made} questions")
            if made == count:
                return
