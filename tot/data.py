"""Rows of a data set in a local file, read through `datasets`: .jsonl, .json, .csv, .parquet, or lines of text."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from tot.decoders.errors import OptionError, unknown

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
