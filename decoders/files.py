"""Files written whole or not at all: a killed process leaves the old file or the new one."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tot.decoders.errors import TaskError, reason


@contextmanager
def writing(path: Path, otherwise: str = "give another file") -> Iterator[None]:
    """Raises TaskError where the block can't write the file, with what to do otherwise."""
    try:
        yield
    except (OSError, UnicodeError) as error:
        raise TaskError(f"{path} can't be written: {reason(error)}; {otherwise}") from None


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A file beside `path` to write to, which takes its place after the block; where that fails, it is deleted."""
    unfinished = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        yield unfinished
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)


def write_text(path: Path, text: str | Iterable[str]) -> None:
    """Write a text, or its pieces, in UTF-8. Raises TaskError where that is impossible."""
    with writing(path), replacing(path) as unfinished, unfinished.open("w", encoding="utf-8") as file:
        file.writelines([text] if isinstance(text, str) else text)


def write_json(path: Path, data: Any) -> None:
    """Write data as indented JSON. Raises TaskError where that is impossible."""
    write_text(path, json.dumps(data, ensure_ascii=False, indent=1) + "\n")
