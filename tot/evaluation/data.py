"""Iterate over the rows of a data set: a local file, a file in an installed package, or a data set on the hub.

This module reads text files (.jsonl, .jsonl.gz, .json, .csv, .txt) without type inference: a CSV cell is always text.
`pyarrow` reads Parquet files, and `datasets` the hub. Rows omit missing values (null, empty cells).
"""

from __future__ import annotations

import csv
import gzip
import json
import re
import zlib
from collections.abc import Callable, Iterator
from datetime import date, time, timedelta
from decimal import Decimal
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from tot.decoders.errors import OptionError, reason, unknown
from tot.decoders.models.model_names import HUB_TIMEOUT
from tot.decoders.request import in_unicode

_Row = tuple[str, dict[str, Any] | OptionError]
_ON_HUB = re.compile(r"([\w.-]+/[\w.-]+)(?::([\w.-]+))?:([\w.-]+)")
"""`org/name:split` or `org/name:configuration:split`."""
_LONGEST_CELL = 2**30
_IN_PACKAGE = re.compile(r"package:(\w+)/([\w./-]+)")


def rows(source: str | Path) -> Iterator[dict[str, Any]]:
    """Iterate over the rows of a data set; a line of a text file is {"text": line}.

    `source` is a file, a package's file (`package:name/file`), or a data set on the hub: `org/name:split` or
    `org/name:configuration:split`. Raises OptionError if a row can't be read.
    """
    for _, result in read(source):
        if isinstance(result, OptionError):
            raise result
        yield result


def read(source: str | Path) -> Iterator[_Row]:
    """Iterate over (place, row), with places such as "line 3" or "row 3", counted from 1.

    An unreadable row is an OptionError instead. Rows omit missing values (null, NaN, empty cells). Raises OptionError
    if no row can be read.
    """
    for place, result in _read(source):
        if isinstance(result, dict):
            plain = {name: _plain(value) for name, value in result.items()}
            result = {name: value for name, value in plain.items() if value is not None and value == value}
        yield place, result


def _plain(value: Any) -> Any:
    """Convert a value to JSON data: dates and decimals become text, lone surrogates become question marks."""
    if isinstance(value, str):
        return in_unicode(value)
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, dict):
        return {_plain(name): _plain(item) for name, item in value.items()}
    return str(value) if isinstance(value, date | time | timedelta | Decimal) else value


def _read(source: str | Path) -> Iterator[_Row]:
    path = located(str(source))
    on_hub = _ON_HUB.fullmatch(str(source))
    if on_hub is not None and not path.exists():
        name, configuration, split = on_hub.groups()
        _reach_hub(str(source), name)
        yield from _load(str(source), name, configuration, split)
        return
    ending = ".jsonl" if path.name.lower().endswith(".jsonl.gz") else path.suffix.lower()
    if ending not in _READERS:
        kind = unknown("kind of data set", path.suffix, _READERS)
        raise OptionError(f"{path}: {kind}; or a data set on the hub, as org/name:split")
    if not path.is_file():
        raise OptionError(f"{path}: there is no such file")
    try:
        yield from _READERS[ending](path)
    except UnicodeError as error:
        raise OptionError(f"{path} can't be read: {reason(error)}: save it as UTF-8") from None
    except (OSError, EOFError, zlib.error) as error:
        raise OptionError(f"{path} can't be read: {reason(error)}") from error


def located(source: str) -> Path:
    """Return the path of a local or packaged file. Raises OptionError if the package is not installed."""
    match = _IN_PACKAGE.fullmatch(source)
    if match is None:
        return Path(source)
    spec = find_spec(match[1])
    if spec is None or not spec.submodule_search_locations:
        raise OptionError(f"{source}: this package is not installed: pip install {match[1].replace('_', '-')}")
    return Path(next(iter(spec.submodule_search_locations)), match[2])


def _reach_hub(source: str, name: str) -> None:
    """Raise OptionError if the hub does not answer: `datasets` would retry for 23 s."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HTTPError  # type: ignore[attr-defined]  # independent of the HTTP client

    try:
        HfApi().dataset_info(name, timeout=HUB_TIMEOUT)
    except (OSError, ValueError, RuntimeError, HTTPError) as error:
        remedy = "check the name and the network, or give a local file with --data"
        raise OptionError(f"{source} can't be read from the hub ({reason(error)}): {remedy}") from error


def _load(source: str, name: str, configuration: str | None, split: str) -> Iterator[_Row]:
    from datasets import load_dataset

    try:
        data = load_dataset(name, configuration, split=split, streaming=True)
        narrow = [column for column, kind in (getattr(data, "features", None) or {}).items() if "float32" in str(kind)]
        for number, row in enumerate(data, 1):
            yield f"row {number}", row | {column: _shortest(row[column]) for column in narrow}
    except StopIteration:  # the file has no rows
        return
    except Exception as error:  # each format's reader raises its own types
        raise OptionError(f"{source} can't be read: {reason(error)}") from error


def _parquet(path: Path) -> Iterator[_Row]:
    from pyarrow import ArrowException
    from pyarrow.parquet import ParquetFile

    try:
        with ParquetFile(path) as file:
            narrow = [one.name for one in file.schema_arrow if str(one.type) in ("float", "list<element: float>")]
            batched = (row for batch in file.iter_batches() for row in batch.to_pylist())
            for number, row in enumerate(batched, 1):
                yield f"row {number}", row | {column: _shortest(row[column]) for column in narrow}
    except ArrowException as error:
        raise OptionError(f"{path} can't be read: {reason(error)}") from error


def _shortest(value: Any) -> Any:
    """Return 32-bit floats with the fewest digits: 0.1 instead of 0.10000000149011612."""
    if isinstance(value, list):
        return [_shortest(item) for item in value]
    return float(str(np.float32(value))) if isinstance(value, float) else value


def _json_lines(path: Path) -> Iterator[_Row]:
    with gzip.open(path) if path.suffix.lower() == ".gz" else path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                yield f"line {number}", _object(f"{path} can't be read: line {number}", line)


def _json(path: Path) -> Iterator[_Row]:
    """Read a JSON list of objects, one object, or an object per line."""
    try:
        data = json.loads(path.read_text(encoding="utf-8-sig"))
    except UnicodeError:
        raise
    except json.JSONDecodeError as error:
        if error.msg != "Extra data":
            raise OptionError(f"{path} can't be read: {reason(error)}") from None
        yield from _json_lines(path)
        return
    except (ValueError, RecursionError) as error:
        raise OptionError(f"{path} can't be read: {reason(error)}") from None
    for number, row in enumerate(data if isinstance(data, list) else [data], 1):
        place = f"row {number}"
        yield (
            place,
            row if isinstance(row, dict) else OptionError(f"{path} can't be read: {place} is not a JSON object"),
        )


def _csv(path: Path) -> Iterator[_Row]:
    csv.field_size_limit(_LONGEST_CELL)
    with path.open(encoding="utf-8-sig", newline="") as file:
        lines = csv.reader(file, strict=True)
        header: list[str] | None = None
        while True:
            line = lines.line_num + 1  # the first line of the row: cells may contain line breaks
            try:
                cells = next(lines)
            except StopIteration:
                return
            except csv.Error as error:
                if header is None:
                    raise OptionError(f"{path} can't be read: line {line}: {error}") from None
                yield _bad(path, line, f"is not CSV ({error})")
                continue
            if not any(cells):
                continue
            if header is None:
                header = [name.strip() for name in cells]
                if repeated := [name for name in header if name and header.count(name) > 1]:
                    raise OptionError(f"{path} can't be read: two columns are named {repeated[0]!r}: rename one")
            elif any(cells[len(header) :]):
                why = f"has {len(cells)} cells, and the header {len(header)}: put quotes around cells with commas"
                yield _bad(path, line, why)
            else:
                yield f"line {line}", {name: cell or None for name, cell in zip(header, cells, strict=False)}


def _text_lines(path: Path) -> Iterator[_Row]:
    with path.open(encoding="utf-8-sig", newline="\n") as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                yield f"line {number}", {"text": line.rstrip("\r\n")}


_READERS: dict[str, Callable[[Path], Iterator[_Row]]] = {
    ".jsonl": _json_lines,
    ".json": _json,
    ".csv": _csv,
    ".txt": _text_lines,
    ".parquet": _parquet,
}


def _bad(path: Path, line: int, why: str) -> _Row:
    return f"line {line}", OptionError(f"{path} can't be read: line {line} {why}")


def _object(subject: str, line: bytes) -> dict[str, Any] | OptionError:
    try:
        data = json.loads(line.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        return OptionError(f"{subject} is not JSON ({reason(error)})")
    return data if isinstance(data, dict) else OptionError(f"{subject} is not a JSON object")


def row(path: str | Path, number: int) -> dict[str, Any]:
    """Return row `number`, counted from 0. Raises OptionError if it does not exist."""
    _, result = next(islice(read(path), number, None), ("", None))
    if result is None:
        raise OptionError(f"{path} has no row {number}: rows are counted from 0")
    if isinstance(result, OptionError):
        raise result
    return result
