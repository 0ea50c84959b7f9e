"""The parts in C: compiled once for this processor with the compiler at hand, and kept in the cache folder.

Where there is no compiler there are none, and torch's operations do the same, slower.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import platform
import shutil
import subprocess
import tempfile
from contextlib import suppress
from importlib.resources import files
from pathlib import Path

from tot.decoders.engine.gguf_cache import cache_folder

log = logging.getLogger(__name__)


@functools.cache
def library(names: str, *options: str) -> ctypes.CDLL | None:
    """The functions of a C file, or of several in one unit ("attention forward"), compiled with the options
    ("-O1", "-DHEAD_DIM=64"); None where that can't be done."""
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        return None
    folder = files("tot.decoders.engine")
    source = b"\n".join(folder.joinpath(f"{name}.c").read_bytes() for name in names.split())
    about = "\0".join([compiler, *options, platform.machine(), *sorted(processor_flags())]).encode()
    path = cache_folder() / "native" / f"{names.replace(' ', '-')}-{hashlib.sha256(source + about).hexdigest()[:16]}.so"
    try:
        if path.exists():
            with suppress(OSError):  # damaged: made anew
                return ctypes.CDLL(str(path))
        _compile(compiler, source, options, path)
        return ctypes.CDLL(str(path))
    except (OSError, subprocess.SubprocessError) as error:
        reason = getattr(error, "stderr", None) or str(error)
        log.warning("%s.c can't be compiled, so decoding is slower: %s", names, reason.strip()[:500])
        return None


def _compile(compiler: str, source: bytes, options: tuple[str, ...], path: Path) -> None:
    """To a file of its own first, so that whoever finds the library finds all of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        code, made = Path(folder) / "source.c", Path(folder) / "library.so"
        code.write_bytes(source)
        command = [compiler, "-march=native", "-shared", "-fPIC", *options, str(code), "-o", str(made), "-lm"]
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=60)
        made.replace(path)


@functools.cache
def processor_flags() -> frozenset[str]:
    """What the processor can do, as Linux says it."""
    return frozenset(_told("flags").split())


@functools.cache
def processor() -> str:
    """The processor's name, as the system tells it."""
    return _told("model name") or platform.processor() or platform.machine()


def _told(what: str) -> str:
    """What Linux says of the first processor; "" elsewhere."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(what)), "")
