"""The parts in C: ready in a wheel, else compiled once with the compiler at hand and kept in the cache folder.

A library is run as the user, so it is taken from a folder that nobody else can write to, or compiled anew. Where there
is no compiler there are none, and torch's operations do the same, slower; why is logged once.
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import logging
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import torch
from torch import Tensor

from tot.decoders.errors import OptionError, reason, unknown
from tot.decoders.files import others_could_write
from tot.decoders.kernels.native.compiling import BUILT, LEVELS, SOURCES, Level, compile_to, file_name, is_whole, source
from tot.decoders.machine import processor_info
from tot.decoders.models.gguf_cache import cache_folder

log = logging.getLogger(__name__)
_HWCAP, _ARM = 16, {"asimd": 1, "asimddp": 20}
"""Where Linux says what an ARM processor can do (getauxval), and in which bits."""


def library(name: str, *options: str) -> ctypes.CDLL | None:
    """The functions of a C file ("forward") and of what it includes, compiled with the options
    ("-O1", "-DHEAD_DIM=64") for this processor; None where that can't be done."""
    known = level()
    return _opened(name, *options, *(() if known is None else known.options))


@functools.cache
def _opened(unit: str, *options: str) -> ctypes.CDLL | None:
    name = file_name(source(unit), unit, options)
    ready, problem = SOURCES / BUILT / name, ""
    try:
        return open_whole(ready)
    except FileNotFoundError:  # no wheel was installed, or it lacks this one
        pass
    except OSError as error:  # damaged, or it needs a newer glibc or a libgomp that is not installed
        cause = reason(error).replace(str(ready), "library")
        problem = f"the ready-made kernels cannot be opened ({cause}); "
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        log_once(logging.WARNING, f"{problem}no C compiler is found, so decoding is slower: install cc, gcc or clang")
        return None
    path = _folder() / name
    try:
        functions = _compiled(path, compiler, unit, options)
    except (OSError, subprocess.SubprocessError) as error:
        cause = (getattr(error, "stderr", None) or str(error)).strip()[:500]
        if problem:  # of all libraries alike
            log_once(logging.WARNING, f"{problem}they can't be compiled either, so decoding is slower: reinstall tot")
        level = logging.INFO if problem else logging.WARNING
        log.log(level, "%s.c can't be compiled, so decoding is slower: %s", unit, cause)
        return None
    if problem:
        log_once(logging.WARNING, f"{problem}they are compiled instead: reinstall tot to skip that")
    return functions


def _compiled(path: Path, compiler: str, unit: str, options: Sequence[str]) -> ctypes.CDLL:
    """The library at `path`, compiled first if it is missing, damaged or possibly another user's."""
    if path.exists() and not others_could_write(path):
        with suppress(OSError):
            return open_whole(path)
    compile_to(path, compiler, unit, options)
    return open_whole(path)


def open_whole(path: Path) -> ctypes.CDLL:
    """Open a library that `compile_to` wrote. Raises OSError if it is damaged: opening half a file ends the process."""
    if not is_whole(path):
        raise OSError(f"{path} is damaged")
    return ctypes.CDLL(str(path))


@functools.cache
def log_once(level: int, message: str) -> None:
    """Log why something slower is done, once a process."""
    log.log(level, message)


def sizes_agree(functions: ctypes.CDLL, name: str, sizes: Sequence[int]) -> bool:
    """Whether structures take so many bytes in C, too: what a library says in the array `name`. If not, that is
    logged, and its functions must not be called."""
    theirs = tuple((ctypes.c_int64 * len(sizes)).in_dll(functions, name))
    if theirs != tuple(sizes):
        told = f"{name} are {theirs} in C and {tuple(sizes)} in Python, so decoding is slower: install tot anew"
        log_once(logging.WARNING, told)
    return theirs == tuple(sizes)


def address(tensor: Tensor, dtype: torch.dtype, strided: bool = False) -> int:
    """Where C finds a tensor's numbers; `strided` where it is told the strides of all but the last dimension. Raises
    TypeError where they are not of that type, not in that order or not on the CPU."""
    ordered = tensor.stride(-1) == 1 if strided else tensor.is_contiguous()
    if tensor.dtype != dtype or tensor.device.type != "cpu" or not ordered:
        found = f"{tensor.dtype} on {tensor.device} with strides {tensor.stride()}"
        raise TypeError(f"C was to read {dtype} in order on the CPU, and got {found}")
    return tensor.data_ptr()


def _folder() -> Path:
    """Where libraries are kept: in the cache folder, if that is the user's alone; else one for this process."""
    folder = cache_folder() / "native"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        problem = others_could_write(folder)
        if not problem:
            folder.chmod(0o700)
            problem = "" if os.access(folder, os.W_OK | os.X_OK) else "can't be written to"
    except OSError as error:
        problem = f"can't be made ({error.strerror})"
    if not problem:
        return folder
    log_once(
        logging.WARNING,
        f"the folder of compiled kernels, {folder}, {problem}, so they are compiled anew for every process: make it "
        "yours alone (chmod 700), or set TOT_CACHE to a folder that is",
    )
    return _folder_for_now()


@functools.cache
def _folder_for_now() -> Path:
    folder = tempfile.mkdtemp(prefix="tot-native-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return Path(folder)


@functools.cache
def processor_flags() -> frozenset[str]:
    """What the processor can do, as Linux says it; on ARM by the bits that it gives every process."""
    if platform.machine() == "aarch64" and sys.platform == "linux":
        told = ctypes.CDLL(None).getauxval(_HWCAP)
        return frozenset(name for name, bit in _ARM.items() if told >> bit & 1)
    return frozenset(processor_info("flags").split())


def level() -> Level | None:
    """The best of LEVELS that this processor has, or the one that $TOT_ISA names; None where it has none. Raises
    OptionError for a name that is not known, or a level that it lacks."""
    wanted = os.environ.get("TOT_ISA")
    if not wanted:
        return next((one for one in LEVELS if processor_flags() >= one.needs), None)
    found = next((one for one in LEVELS if one.name == wanted), None)
    if found is None:
        raise OptionError(unknown("TOT_ISA", wanted, [one.name for one in LEVELS]))
    if lacking := found.needs - processor_flags():
        raise OptionError(f"TOT_ISA is {wanted}, and this processor lacks {', '.join(sorted(lacking))}: leave it out")
    return found


def lanes() -> int:
    """Numbers in a vector of simd.h."""
    known = level()
    return 8 if known is None else known.lanes


def largest_byte() -> int:
    """The largest weight that add_bytes of simd.h multiplies."""
    known = level()
    return 120 if known is None else known.largest_byte
