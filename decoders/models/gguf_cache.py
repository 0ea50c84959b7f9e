"""Cache of converted GGUF files in the user's cache folder. Each is written once, and atomically.

A conversion is written to a temporary folder, its manifest last, and renamed into place under a file lock. A folder is
never used if its manifest is missing or does not match its files, or if another user can write to it.
"""

from __future__ import annotations

import atexit
import errno
import functools
import glob
import hashlib
import json
import logging
import os
import re
import shutil
import tempfile
import uuid
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock

from tot.decoders.errors import ModelError, TaskError, reason
from tot.decoders.files import fingerprint, others_could_write, sync, write_json
from tot.decoders.models.gguf_convert import convert
from tot.decoders.models.gguf_parts import gguf_parts
from tot.decoders.models.gguf_reader import GGUFFile, read_gguf

log = logging.getLogger(__name__)
FORMAT = 3  # version of the manifest and the conversion; increment it when either changes
MANIFEST = "manifest.json"


@dataclass(frozen=True)
class CachedModel:
    """A complete conversion: its folder, and a unique id of this build."""

    folder: Path
    build: str


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


def cached_model(path: Path, root: Path, distrust: str | None = None, matrices: bool = True) -> CachedModel:
    """Return the conversion of the GGUF file at `path` in `root`, converting it first if it is missing.

    `matrices` is as for `convert`. `distrust` is the `build` of an unreadable conversion, which is replaced. Waits
    while another process converts the same file. If `root` can't be written, converts to a temporary folder. Raises
    ModelError if the file can't be read or converted, or the disk is full.
    """
    try:
        digest = hash_files(gguf_parts(path))
    except OSError as error:
        raise ModelError(f"{path} can't be read ({error.strerror}): check the path and its permissions") from error
    folder = _folder(root, path, digest, FORMAT, matrices)
    model = read_manifest(folder)
    if model is not None and model.build != distrust:
        return model
    from safetensors import SafetensorError

    gguf_file = read_gguf(path)
    try:
        root.mkdir(parents=True, exist_ok=True)
        with FileLock(root / f"{folder.name}.lock"):
            return _convert_locked(gguf_file, digest, folder, distrust, matrices)
    except (OSError, SafetensorError) as error:
        # A SafetensorError has no errno; only its text distinguishes a full disk from a read-only one.
        full = getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT) or "No space left" in str(error)
        if full:
            raise _no_space(gguf_file, root, matrices) from error
        elsewhere = temporary_cache() / "models"
        if root == elsewhere:
            raise ModelError(f"the temporary folder {root} can't be written: {reason(error)}; set TMPDIR") from error
        log.warning(
            "the cache folder %s can't be written (%s), so models are converted again for every process: make it "
            "writable, or set TOT_CACHE to a folder that is",
            root,
            reason(error),
        )
        return cached_model(path, elsewhere, distrust, matrices)


def _folder(root: Path, path: Path, digest: str, version: int, matrices: bool) -> Path:
    return root / f"{path.stem}-{digest[:16]}-v{version}{'' if matrices else '-packed'}"


def _convert_locked(file: GGUFFile, digest: str, folder: Path, distrust: str | None, matrices: bool) -> CachedModel:
    model = read_manifest(folder)
    if model is not None and model.build != distrust:
        return model  # another process converted it while this one waited for the lock
    # Only the lock holder writes under this name, so existing files are damaged, or from a killed conversion.
    older = [_folder(folder.parent, file.path, digest, version, matrices) for version in range(1, FORMAT)]
    for stale in (folder, *older, *folder.parent.glob(f"{glob.escape(folder.name)}.tmp-*")):
        shutil.rmtree(stale, ignore_errors=True)
    if shutil.disk_usage(folder.parent).free < file.converted_bytes(matrices):
        raise _no_space(file, folder.parent, matrices)
    scratch = Path(tempfile.mkdtemp(prefix=f"{folder.name}.tmp-", dir=folder.parent))
    try:
        convert(file, scratch, matrices)
        _write_manifest(scratch)
        scratch.rename(folder)
        sync(folder.parent)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    model = read_manifest(folder)
    if model is None:
        cause = others_could_write(folder, trust_root=True) or "was changed while it was written"
        raise ModelError(f"the converted model in {folder} {cause}: set TOT_CACHE to a private folder")
    return model


def read_manifest(folder: Path) -> CachedModel | None:
    """Return the conversion in `folder`; None if it is missing, damaged, of another format, or writable by others."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text())
        if manifest["format"] != FORMAT or others_could_write(folder, trust_root=True):
            return None
        files = _files(folder)
        if any(others_could_write(file, trust_root=True) for file in files):
            return None
        if {file.name: fingerprint(file) for file in files} != manifest["files"]:
            return None
        return CachedModel(folder, str(manifest["build"]))
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return None


def _files(folder: Path) -> list[Path]:
    """Return the files of a conversion, without its manifest and packed weights."""
    return sorted(file for file in folder.iterdir() if not file.name.startswith((MANIFEST, "packed-", ".")))


def _write_manifest(folder: Path) -> None:
    files = _files(folder)
    for file in files:
        file.chmod(0o600)
        sync(file)
    manifest = {
        "format": FORMAT,
        "build": uuid.uuid4().hex,
        "files": {file.name: fingerprint(file) for file in files},
    }
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=1))
    sync(folder / MANIFEST)
    sync(folder)


def _no_space(file: GGUFFile, root: Path, matrices: bool) -> ModelError:
    needed, free = file.converted_bytes(matrices), shutil.disk_usage(root).free
    return ModelError(
        f"converting {file.path.name} needs {needed:,} bytes in {root}, {free:,} are free: "
        "free some space, or set TOT_CACHE to a folder on another disk"
    )
