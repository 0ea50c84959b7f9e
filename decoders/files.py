"""Files written whole or not at all: a killed process leaves the old file or the new one."""

from __future__ import annotations

import hashlib
import json
import os
import stat
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from tot.decoders.errors import TaskError, TotError, reason

_MIB, _PAGE = 2**20, 4096
_HASHED_WHOLE = 16 * _MIB
"""Larger files are sampled."""


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
    """Write a text, or its pieces, in UTF-8. Raises TaskError where that is impossible.

    Half of a surrogate pair is written as its JSON escape, so that JSON is read back as it was.
    """
    with (
        writing(path),
        replacing(path) as unfinished,
        unfinished.open("w", encoding="utf-8", errors="backslashreplace") as file,
    ):
        file.writelines([text] if isinstance(text, str) else text)


def write_json(path: Path, data: Any) -> None:
    """Write data as indented JSON. Raises TaskError where that is impossible."""
    write_text(path, json.dumps(data, ensure_ascii=False, indent=1) + "\n")


def hold(path: Path, refusal: TotError) -> Callable[[], None]:
    """Lock a file until the returned function is called or the process ends. Raises `refusal` if another run has it."""
    lock = FileLock(path, blocking=False)
    try:
        lock.acquire()
    except Timeout:
        raise refusal from None

    def release() -> None:
        path.unlink(missing_ok=True)
        lock.release()

    return release


def fingerprint(path: Path) -> str:
    """A SHA-256 of a file's size and content; of a file above 16 MiB, of its first MiB and the first page of each MiB
    after it. Finds files that were cut, zeroed or replaced without reading gigabytes."""
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        digest = hashlib.sha256(str(size).encode())
        file.seek(0)
        digest.update(file.read(size if size <= _HASHED_WHOLE else _MIB))
        if size > _HASHED_WHOLE:
            for start in range(_MIB, size, _MIB):
                file.seek(start)
                digest.update(file.read(_PAGE))
    return digest.hexdigest()


def others_could_write(path: Path, trust_root: bool = False) -> str:
    """Why somebody else may have written a file or folder, in words; "" where only the user could have. With
    `trust_root` root may have, too. Raises OSError if there is no such file."""
    if not hasattr(os, "getuid"):  # Windows: the user's folders are the user's
        return ""
    found = path.lstat()
    if stat.S_ISLNK(found.st_mode):
        return "is a link"
    if not (stat.S_ISREG(found.st_mode) or stat.S_ISDIR(found.st_mode)):
        return "is neither a file nor a folder"
    if found.st_uid != os.getuid() and not (trust_root and found.st_uid == 0):
        return f"belongs to another user (number {found.st_uid})"
    return "can be written to by others" if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH) else ""
