"""The cache folder, and the hashes of model and data files that are kept in it."""

from __future__ import annotations

import atexit
import functools
import hashlib
import json
import os
import re
import shutil
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from tot.decoders.errors import TaskError
from tot.decoders.files import others_could_write, write_json


def cache_folder() -> Path:
    """Return the cache folder of tot: $TOT_CACHE, or the user's cache folder."""
    from platformdirs import user_cache_path

    override = os.environ.get("TOT_CACHE")
    return Path(override).expanduser() if override else user_cache_path("tot")


@functools.cache
def temporary_cache() -> Path:
    """Return a folder to use if the cache folder can't be written. It is deleted when the process ends."""
    folder = tempfile.mkdtemp(prefix="tot-cache-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return Path(folder)


def hash_file(path: Path) -> str:
    """Return a file's SHA-256, cached by path, size and modification time."""
    state = path.stat()
    key = [str(path), state.st_size, state.st_mtime_ns]
    cached = cache_folder() / "sha256" / f"{hashlib.sha256(str(path).encode()).hexdigest()[:24]}.json"
    with suppress(OSError, ValueError, LookupError, TypeError, RecursionError):
        entry = json.loads(cached.read_text())
        trusted = not others_could_write(cached, trust_root=True)
        if trusted and entry["file"] == key and re.fullmatch("[0-9a-f]{64}", entry["sha256"]):
            return str(entry["sha256"])
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    with suppress(OSError, TaskError):  # the cache is optional
        cached.parent.mkdir(parents=True, exist_ok=True)
        write_json(cached, {"file": key, "sha256": digest}, private=True)
    return digest


def hash_files(files: Sequence[Path]) -> str:
    """Return the SHA-256 of a file, or of the hashes of several."""
    hashes = [hash_file(file.resolve()) for file in files]
    return hashes[0] if len(hashes) == 1 else hashlib.sha256("".join(hashes).encode()).hexdigest()
