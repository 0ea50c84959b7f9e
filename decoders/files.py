"""Files written whole or not at all: a killed process leaves the old file or the new one."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tot.decoders.errors import TaskError


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
    try:
        with replacing(path) as unfinished, unfinished.open("w", encoding="utf-8") as file:
            file.writelines([text] if isinstance(text, str) else text)
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise TaskError(f"{path} can't be written: {reason}; give another file") from None


def write_json(path: Path, data: Any) -> None:
    """Write data as indented JSON. Raises TaskError where that is impossible."""
    write_text(path, json.dumps(data, ensure_ascii=False, indent=1) + "\n")
