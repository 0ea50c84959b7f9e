"""PrefixCache: keys and values of the beginnings of prompts, kept in the cache folder for later processes.

A prompt is cut into blocks of 32 tokens, with one file each. A file is named by a hash of the model, of the code that
computes it, and of all tokens up to the end of its block. So a prompt finds the blocks that it shares with any earlier
prompt, such as demonstrations, a system prompt or tool descriptions. Loaded and computed numbers are equal bit for bit.

Files are written by a thread, and the least recently used ones are deleted. The cache is optional: a file or folder
that can't be used costs time, never a request.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import secrets
import shutil
import struct
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, Self

import numpy as np

from tot.decoders.cache import cache_folder
from tot.decoders.engine.radix_cache import Branch
from tot.decoders.engine.runner import Runner
from tot.decoders.errors import TotError, reason
from tot.decoders.files import others_could_write
from tot.decoders.kernels.backend import SlotStore

log = logging.getLogger(__name__)
Call = Callable[[Callable[[], None]], Any]
"""Runs a function in the engine's thread between two steps."""

BLOCK = 32
"""Tokens of a file."""
_MIN_TOKENS = 128
"""Fewer new tokens of a prompt are computed again sooner than they are worth a file."""
_MAX_PROMPTS = 16
"""Prompts that an engine writes. Prompts of one kind begin alike, so later ones have little that is new."""
_MAX_BYTES = 2**30
_DISK_SHARE = 10
"""The files take at most _MAX_BYTES, and one of this number of parts of the disk's free space."""
_PROMPT_SHARE = 8
"""A prompt takes at most one of this number of parts of _MAX_BYTES."""
_CLOSING_SECONDS = 2.0
"""How long closing waits for files to be written."""
_HEADER = struct.Struct("<8sI")
"""The format's name, and the CRC-32 of the rest: the tokens as int32, then keys and values."""
_FORMAT = b"tot-kv-2"


class PrefixCache:
    """The blocks of one model, which an engine's RadixCache loads and saves. Used by the engine's thread only."""

    def __init__(self, folder: Path, key: bytes, runner: Runner, store: SlotStore, call: Call) -> None:
        """`key` identifies the model and the code that computes its keys and values. `call` is the engine's."""
        self._folder, self._key, self._call = folder, key, call
        self._cache, self._store = runner.cache, store
        self._size = _HEADER.size + 4 * BLOCK + BLOCK * runner.slot_bytes
        self._prompts_left = _MAX_PROMPTS
        self._writers: list[threading.Thread] = []

    @classmethod
    def open(cls, runner: Runner, call: Call) -> Self | None:
        """Return the cache of a model from files, or None if it has or can have none."""
        loaded, backend = runner.loaded, runner.backend
        if not isinstance(backend, SlotStore) or loaded.module is not None:
            return None  # anybody can change the weights of a module
        folder = cache_folder() / "prefixes"
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            files = [(str(path), (state := path.stat()).st_size, state.st_mtime_ns) for path in loaded.weights.files]
            if problem := others_could_write(folder):
                log.warning("%s %s, so no prompts are kept in it: make it private (chmod 700)", folder, problem)
                return None
        except OSError as error:
            log.info("no prompts are kept in %s: %s", folder, reason(error))
            return None
        settings = json.dumps(vars(loaded.config), default=str, sort_keys=True)
        key = hashlib.sha256("\0".join([str(files), settings, backend.code]).encode()).digest()
        return cls(folder, key, runner, backend, call)

    def load(self, branch: Branch) -> None:
        """Load the blocks of a branch that are not computed, up to the first one that has no file."""
        tokens, computed, now = self._cache.tokens(branch), self._cache.computed_length(branch), time.time_ns()
        for number, path in enumerate(self._paths(tokens)):
            block = slice(number * BLOCK, (number + 1) * BLOCK)
            if block.stop <= computed:
                continue
            content = self._read(path, tokens[block])
            if content is None:
                return
            self._store.write_slots(branch.slots[block], content)
            self._cache.mark_computed(branch.slots[block])
            _set_used(path, now, number)

    def save(self, branch: Branch, new: int) -> None:
        """Write the blocks of a computed prompt with `new` new tokens, if it begins like no earlier prompt."""
        if new < max(_MIN_TOKENS, len(branch) / 2) or not self._prompts_left:
            return
        self._prompts_left -= 1
        held, tokens = self._cache.fork(branch), self._cache.tokens(branch)  # until its slots are read
        writer = threading.Thread(target=self._write, args=[held, tokens], name="tot-prefixes", daemon=True)
        self._writers.append(writer)
        writer.start()

    def close(self) -> None:
        """Wait a moment for the files. Files that are not complete by then are not used."""
        end = time.monotonic() + _CLOSING_SECONDS
        for writer in self._writers:
            writer.join(max(0.0, end - time.monotonic()))

    def _paths(self, tokens: Sequence[int]) -> Iterator[Path]:
        """Yield the file of each whole block."""
        digest = self._key
        for stop in range(BLOCK, len(tokens) + 1, BLOCK):
            digest = hashlib.sha256(digest + _packed(tokens[stop - BLOCK : stop])).digest()
            yield self._folder / f"{digest.hex()[:40]}.kv"

    def _read(self, path: Path, tokens: Sequence[int]) -> memoryview | None:
        """Return the keys and values in a file. Returns None without a file; one that can't be used is deleted."""
        try:
            problem = others_could_write(path)
            content = path.read_bytes() if not problem and path.stat().st_size == self._size else b""
        except FileNotFoundError:
            return None
        except OSError as error:
            log.warning("%s can't be read (%s), so its prompt is computed again", path, reason(error))
            return None
        if content and _HEADER.unpack_from(content) == (_FORMAT, zlib.crc32(memoryview(content)[_HEADER.size :])):
            head = _HEADER.size + 4 * BLOCK
            if content[_HEADER.size : head] == _packed(tokens):
                return memoryview(content)[head:]
        log.warning("%s %s, so its prompt is computed again", path, problem or "is damaged")
        with suppress(OSError):
            path.unlink()
        return None

    def _write(self, branch: Branch, tokens: Sequence[int]) -> None:
        """Write files, each complete or not at all, and delete the least recently used ones. Runs in a thread."""
        now, most = time.time_ns(), _MAX_BYTES // _PROMPT_SHARE // self._size
        try:
            for number, path in enumerate(islice(self._paths(tokens), most)):
                if not path.exists():
                    block = slice(number * BLOCK, (number + 1) * BLOCK)
                    rest = _packed(tokens[block]) + self._store.read_slots(branch.slots[block])
                    unfinished = path.with_suffix(f".{secrets.token_hex(8)}")
                    try:
                        unfinished.touch(mode=0o600)
                        unfinished.write_bytes(_HEADER.pack(_FORMAT, zlib.crc32(rest)) + rest)
                        unfinished.replace(path)
                    finally:
                        unfinished.unlink(missing_ok=True)
                _set_used(path, now, number)
            self._evict()
        except OSError as error:
            self._prompts_left = 0
            log.info("no more prompts are kept in %s: %s", self._folder, reason(error))
        finally:
            with suppress(TotError):  # the engine is closed or has failed
                self._call(partial(self._cache.release, branch))

    def _evict(self) -> None:
        """Delete the least recently used files until the rest is within the limit."""
        files = []
        for path in self._folder.iterdir():
            with suppress(FileNotFoundError):  # another process has just deleted it
                state = path.lstat()
                files.append((state.st_mtime_ns, state.st_size, path))
        used = sum(size for _, size, _ in files)
        limit = min(_MAX_BYTES, (used + shutil.disk_usage(self._folder).free) // _DISK_SHARE)
        for _, size, path in sorted(files):
            if used <= limit:
                return
            path.unlink(missing_ok=True)
            used -= size


def _packed(tokens: Sequence[int]) -> bytes:
    return np.array(tokens, dtype=np.int32).tobytes()


def _set_used(path: Path, now: int, number: int) -> None:
    """Mark the file of a block as used. Later blocks of a prompt, which are useless alone, count as older."""
    used = now - number * 1_000_000
    with suppress(OSError):
        os.utime(path, ns=(used, used))
