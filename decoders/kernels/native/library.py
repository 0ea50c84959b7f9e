"""The C libraries: built into a wheel, or compiled once by the local compiler and kept in the cache folder.

A library runs as the user, so it is loaded only from a folder that other users cannot write to; otherwise it is
compiled again. Without a compiler, slower torch operations compute the same results, and the reason is logged once.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import math
import mmap
import os
import shutil
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from tot.decoders.cache import cache_folder, temporary_cache
from tot.decoders.errors import OptionError, reason, unknown
from tot.decoders.files import others_could_write
from tot.decoders.kernels.native.compiling import (
    BUILT,
    EXPORTS,
    LEVELS,
    POOL,
    SEAL,
    SOURCES,
    Level,
    compile_to,
    sealed,
    suffix,
)
from tot.decoders.machine import processor_flags
from tot.decoders.models.shapes import Array

log = logging.getLogger(__name__)
_LINE = 64
"""Bytes of a cache line."""


class Library:
    """The functions of a C file in a shared library. Raises AttributeError if the library lacks them."""

    forward: Any
    scratch_floats: Any
    read_rows: Any

    def __init__(self, shared: ctypes.CDLL, unit: str, ending: str) -> None:
        self.path = Path(shared._name)
        for name in EXPORTS[unit]:
            setattr(self, name, getattr(shared, f"{name}_{ending}"))


def library(name: str, *options: str) -> Library | None:
    """Return the functions of a C file ("forward") compiled with `options` ("-O1", "-DHEAD_DIM=64") for this processor.

    Returns None if there is no library and it cannot be compiled."""
    current = level()
    if _opened(*POOL) is None:  # the others need its threads
        return None
    return _opened(name, *options, *(() if current is None else current.options))


@functools.cache
def _opened(unit: str, *options: str) -> Library | None:
    ending, current, problem = suffix(unit, options), level(), ""
    built = SOURCES / BUILT / f"{current.name if current else None}.so"
    try:
        return Library(_built(built), unit, ending)
    except (FileNotFoundError, AttributeError):  # no wheel is installed, or it lacks this variant
        pass
    except OSError as error:  # damaged, or needs a newer glibc
        cause = reason(error).replace(str(built), "library")
        problem = f"the prebuilt kernels can't be opened ({cause}); "
    try:
        name = f"{unit}-{ending}.so"
        functions = Library(_kept(name) or _compiled(name, unit, options), unit, ending)
    except FileNotFoundError:
        log_once(logging.WARNING, f"{problem}no C compiler was found, so decoding is slower: install cc, gcc or clang")
        return None
    except (OSError, subprocess.SubprocessError) as error:
        cause = (getattr(error, "stderr", None) or str(error)).strip()[:500]
        if problem:  # the same for all libraries
            log_once(logging.WARNING, f"{problem}they can't be compiled either, so decoding is slower: reinstall tot")
        severity = logging.INFO if problem else logging.WARNING
        log.log(severity, "%s.c can't be compiled, so decoding is slower: %s", unit, cause)
        return None
    if problem:
        log_once(logging.WARNING, f"{problem}they are compiled instead: reinstall tot to avoid this")
    return functions


def _kept(name: str) -> ctypes.CDLL | None:
    """Open a library of the cache folder, which may be read-only; None if another user may have written it."""
    path = cache_folder() / "native" / name
    with suppress(OSError):  # missing or damaged
        if not any(others_could_write(place, trust_root=True) for place in (path.parent, path)):
            return open_whole(path)
    return None


def _compiled(name: str, unit: str, options: Sequence[str]) -> ctypes.CDLL:
    """Compile a library and open it. Raises FileNotFoundError without a compiler."""
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        raise FileNotFoundError("no C compiler")
    path = _folder() / name
    compile_to(path, compiler, (unit, *options))
    return open_whole(path)


def open_whole(path: Path) -> ctypes.CDLL:
    """Open a library that `compile_to` wrote. Raises OSError if it is damaged: loading half a file ends the process."""
    content = path.read_bytes()
    if content != sealed(content[:-SEAL]):
        raise OSError(f"{path} is damaged")
    return ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)


_built = functools.cache(open_whole)


@functools.cache
def log_once(level: int, message: str) -> None:
    """Log a message once per process."""
    log.log(level, message)


def address(array: Array, dtype: DTypeLike) -> int:
    """Return the address of an array's data for C. Raises TypeError if it has another dtype or is not contiguous."""
    if array.dtype != dtype or not array.flags.c_contiguous:
        actual = f"{array.dtype} with strides of {array.strides} bytes"
        raise TypeError(f"C needs a contiguous array of {np.dtype(dtype)}, and got {actual}")
    return int(array.ctypes.data)


def empty(shape: Sequence[int], dtype: DTypeLike) -> Array:
    """Return a new array that begins at a cache line, so that no vector in a row of 64 bytes spans two lines."""
    size = math.prod(shape) * np.dtype(dtype).itemsize
    memory = np.empty(size + _LINE, dtype=np.uint8)
    start = -memory.ctypes.data % _LINE
    return memory[start : start + size].view(dtype).reshape(shape)


def lazy_zeros(shape: Sequence[int], dtype: DTypeLike) -> Array:
    """Return a new array of zeros, whose memory is taken page by page when it is first written to.

    numpy asks for pages of 2 MiB, which takes long and much memory if an array is used in many small places. Raises
    MemoryError.
    """
    size = math.prod(shape) * np.dtype(dtype).itemsize
    try:
        memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryError(f"no memory for {size:,} bytes ({error.strerror})") from error
    if hasattr(mmap, "MADV_NOHUGEPAGE"):
        with suppress(OSError):  # a kernel without such pages
            memory.madvise(mmap.MADV_NOHUGEPAGE)
    return np.frombuffer(memory, dtype=np.uint8).view(dtype).reshape(shape)


def _folder() -> Path:
    """Return the folder for compiled libraries: in the cache folder if it is the user's alone, else a temporary one."""
    folder = cache_folder() / "native"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        problem = others_could_write(folder)
        if not problem:
            folder.chmod(0o700)
            problem = "" if os.access(folder, os.W_OK | os.X_OK) else "can't be written to"
    except OSError as error:
        problem = f"can't be created ({error.strerror})"
    if not problem:
        return folder
    log_once(
        logging.WARNING,
        f"the folder of compiled kernels, {folder}, {problem}, so they are compiled again for every process: "
        "make it private (chmod 700), or set TOT_CACHE to a private folder",
    )
    return temporary_cache()


def level() -> Level | None:
    """Return the best of LEVELS that this processor supports, or the one that $TOT_ISA names; None if it supports none.

    Raises OptionError for an unknown name, or a level that the processor does not support."""
    name = os.environ.get("TOT_ISA")
    if not name:
        return next((level for level in LEVELS if processor_flags() >= level.needs), None)
    selected = next((level for level in LEVELS if level.name == name), None)
    if selected is None:
        raise OptionError(unknown("TOT_ISA", name, [level.name for level in LEVELS]))
    if missing := selected.needs - processor_flags():
        raise OptionError(f"TOT_ISA is {name}, and this processor lacks {', '.join(sorted(missing))}: unset TOT_ISA")
    return selected


def lanes() -> int:
    """Return the number of lanes of a vector in simd.h."""
    current = level()
    return 8 if current is None else current.lanes
