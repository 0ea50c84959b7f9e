"""Atomic file writes: a killed process or a power failure leaves either the old file or the new one."""

from __future__ import annotations

import errno
import json
import os
import secrets
import stat
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from filelock import FileLock, Timeout

from tot.decoders.errors import TaskError, TotError, reason

_ADVICE = "give another file"


@contextmanager
def writing(path: Path, otherwise: str = _ADVICE) -> Iterator[None]:
    """Raise TaskError if the block can't write the file; `otherwise` is the advice in its message."""
    try:
        yield
    except (OSError, UnicodeError) as error:
        raise TaskError(f"{path} can't be written: {reason(error)}; {otherwise}") from None


@contextmanager
def replacing(path: Path, private: bool = False) -> Iterator[IO[bytes]]:
    """Yield a new file next to `path`. After the block it is synced to disk and renamed; it is deleted if that fails.

    Its name can't be guessed, so another user can't put a link in its place. A `private` file is for the user alone.
    """
    unfinished = regular(path).with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")
    try:
        with unfinished.open("xb") as file:
            if private:
                unfinished.chmod(0o600)
            yield file
            file.flush()
            os.fsync(file.fileno())
        unfinished.replace(path)
        with suppress(OSError):  # a file system that can't sync folders
            sync(path.parent)
    finally:
        unfinished.unlink(missing_ok=True)


def sync(path: Path) -> None:
    """Write a file or the names in a folder to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def append(file: IO[bytes], data: bytes) -> None:
    """Append to an unbuffered file. If that fails, as on a full disk, the file keeps its length."""
    end, rest = file.seek(0, os.SEEK_END), memoryview(data)
    try:
        while rest:
            rest = rest[file.write(rest) :]
    except OSError:
        file.truncate(end)
        raise


def regular(path: Path) -> Path:
    """Return a path. Raises OSError if it is a pipe or a device, whose content may have no end."""
    if path.exists() and not (path.is_file() or path.is_dir()):
        raise OSError(errno.EINVAL, "not a regular file")
    return path


def write_text(path: Path, text: str | Iterable[str], private: bool = False, otherwise: str = _ADVICE) -> None:
    """Write a text, or its pieces, in UTF-8. Raises TaskError with the advice `otherwise` on failure.

    An unpaired surrogate is written as its JSON escape, so that JSON round-trips.
    """
    with writing(path, otherwise), replacing(path, private) as file:
        file.writelines(
            piece.encode("utf-8", "backslashreplace") for piece in ([text] if isinstance(text, str) else text)
        )


def write_json(path: Path, data: Any, private: bool = False, otherwise: str = _ADVICE) -> None:
    """Write data as indented JSON. Raises TaskError with the advice `otherwise` on failure."""
    write_text(path, json.dumps(data, ensure_ascii=False, indent=1) + "\n", private, otherwise)


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


def others_could_write(path: Path, trust_root: bool = False) -> str:
    """Describe why another user may have written a file or folder; "" if only the user could have.

    With `trust_root`, root is trusted, too. Raises OSError if the file does not exist."""
    status = path.lstat()
    if stat.S_ISLNK(status.st_mode):
        return "is a link"
    if not (stat.S_ISREG(status.st_mode) or stat.S_ISDIR(status.st_mode)):
        return "is neither a file nor a folder"
    if status.st_uid != os.getuid() and not (trust_root and status.st_uid == 0):
        return f"belongs to another user (number {status.st_uid})"
    return "can be written to by others" if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH) else ""
