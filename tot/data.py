"""Rows of a data set, one after another: from a local file (.jsonl, .json, .csv, .parquet, or lines of text), one of an
installed package, or from the hub, through `datasets`. Lines of .jsonl (.jsonl.gz) are read one by one here, so that a
bad one spoils no other."""

from __future__ import annotations

import gzip
import json
import re
import zlib
from collections.abc import Iterator
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import Any

from tot.decoders.errors import OptionError, reason, unknown

_BUILDERS = {".jsonl": "json", ".json": "json", ".csv": "csv", ".parquet": "parquet", ".txt": "text"}
_ON_HUB = re.compile(r"([\w.-]+/[\w.-]+)(?::([\w.-]+))?:([\w.-]+)")
"""org/name:split or org/name:configuration:split."""
_IN_PACKAGE = re.compile(r"package:(\w+)/([\w./-]+)")


def rows(source: str | Path) -> Iterator[dict[str, Any]]:
    """The rows of a file, of a package's file (`package:name/file`), or of `org/name:split`
    (`org/name:configuration:split`) on the hub; a line of text is {"text": line}.

    Raises OptionError where they can't be read.
    """
    for _, found in read(source):
        if isinstance(found, OptionError):
            raise found
        yield found


def read(source: str | Path) -> Iterator[tuple[str, dict[str, Any] | OptionError]]:
    """Each row with its place ("line 3", "row 3"; the first is 1), or what is wrong with it where others may still be
    read. Raises OptionError where none can."""
    path = located(str(source))
    on_hub = _ON_HUB.fullmatch(str(source))
    if on_hub is not None and not path.exists():
        name, configuration, split = on_hub.groups()
        yield from _load(str(source), name, configuration, split=split)
        return
    ending = ".jsonl" if path.name.lower().endswith(".jsonl.gz") else path.suffix.lower()
    builder = _BUILDERS.get(ending)
    if builder is None:
        kind = unknown("kind of data set", path.suffix, _BUILDERS)
        raise OptionError(f"{path}: {kind}; or a data set of the hub, as org/name:split")
    if not path.is_file():
        raise OptionError(f"{path}: there is no such file")
    if ending == ".jsonl":
        yield from _lines(path)
    else:
        yield from _load(str(path), builder, data_files=str(path), split="train")


def located(source: str) -> Path:
    """A file by its path, or one of an installed package. Raises OptionError where there is no such package."""
    found = _IN_PACKAGE.fullmatch(source)
    if found is None:
        return Path(source)
    spec = find_spec(found[1])
    if spec is None or not spec.submodule_search_locations:
        raise OptionError(f"{source}: this package is not installed: pip install {found[1].replace('_', '-')}")
    return Path(next(iter(spec.submodule_search_locations)), found[2])


def _load(what: str, *arguments: Any, **options: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    from datasets import load_dataset

    try:
        for number, row in enumerate(load_dataset(*arguments, streaming=True, **options), 1):
            yield f"row {number}", row
    except StopIteration:  # a file without rows
        return
    except Exception as error:  # whatever the reader of the format raises
        raise OptionError(f"{what} can't be read: {reason(error)}") from error


def _lines(path: Path) -> Iterator[tuple[str, dict[str, Any] | OptionError]]:
    try:
        with gzip.open(path) if path.suffix.lower() == ".gz" else path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    yield f"line {number}", _object(f"{path} can't be read: line {number}", line)
    except (OSError, EOFError, zlib.error) as error:
        raise OptionError(f"{path} can't be read: {reason(error)}") from error


def _object(what: str, line: bytes) -> dict[str, Any] | OptionError:
    try:
        found = json.loads(line.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        return OptionError(f"{what} is not JSON ({reason(error)})")
    return found if isinstance(found, dict) else OptionError(f"{what} is not a JSON object")


def row(path: str | Path, number: int) -> dict[str, Any]:
    """Row `number`, at least 0. Raises OptionError where there is none."""
    found = list(islice(rows(path), number, number + 1))
    if not found:
        raise OptionError(f"{path} has no row {number}: rows are counted from 0")
    return found[0]
