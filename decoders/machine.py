"""Properties of the machine: processor or GPU, free memory, and limits of the container."""

from __future__ import annotations

import ctypes
import functools
import gc
import math
import os
import platform
import resource
import sys
import threading
import time
from importlib.metadata import version
from pathlib import Path, PurePosixPath
from typing import Any

import psutil

MAX_THREADS = 1024
"""The largest number of threads that can be set, as in pool.c."""

_ARM = {"asimd": (16, 1), "asimddp": (16, 20)}
"""Features of ARM processors: the getauxval entry in which Linux lists each, and its bit there."""
_TILES = {"amx_tile", "amx_bf16"}


def describe(device: str, dtype: Any = None) -> str:
    """Describe in one line: processor or GPU, threads, versions, and dtype."""
    if device != "cpu":
        import torch

        hardware = torch.cuda.get_device_name(device)
    else:
        hardware = f"{processor()}, {threads()} threads"
    number_format = "" if dtype is None else f", {dtype}"
    return f"{hardware}; torch {version('torch')}, transformers {version('transformers')}{number_format}"


def free_memory(device: str) -> int:
    """Return the free bytes of a device; on the CPU within the limits of the container and of the process."""
    if device != "cpu":
        import torch

        return int(torch.cuda.mem_get_info(device)[0])
    groups = map(_free_in_group, control_groups())
    return min(int(psutil.virtual_memory().available), free_in_limit(), *groups)


def give_back() -> None:
    """Run the garbage collector and return freed memory to the system."""
    gc.collect()
    torch = sys.modules.get("torch")  # without it, no memory of a GPU is held
    if torch is not None and torch.cuda.is_available():
        torch.cuda.empty_cache()
    trim()


def trim() -> None:
    """Return freed memory to the system.

    glibc keeps freed allocations below 32 MiB, which includes most weights of a model."""
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # not every C library has it
        if trim is not None:
            trim(0)


def free_in_limit() -> int:
    """Return the bytes that this process may still map within its limit (ulimit -v)."""
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    return sys.maxsize if limit == resource.RLIM_INFINITY else max(0, limit - int(psutil.Process().memory_info().vms))


def _free_in_group(group: Path) -> int:
    """Return the free bytes within the memory limit of a control group."""
    try:
        limit = int((group / "memory.max").read_text())  # "max" if unlimited
        used = int((group / "memory.current").read_text())
        counts = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        return max(0, limit - used + int(counts.get("inactive_file", 0)))  # cached files are evicted first
    except (OSError, ValueError):
        return sys.maxsize


_GROUPS = Path("/sys/fs/cgroup")
_OWN_GROUP = Path("/proc/self/cgroup")


def control_groups() -> list[Path]:
    """Return the folders of this process's control group and its parents; [] without control groups."""
    try:
        own = next(line[3:] for line in _OWN_GROUP.read_text().splitlines() if line.startswith("0::"))
    except (OSError, StopIteration):
        return []
    inner = PurePosixPath(own.lstrip("/"))
    return [_GROUPS / group for group in (inner, *inner.parents)]


_of_thread = threading.local()


def use_threads(count: int | None) -> None:
    """Set the number of threads for the forward passes that the calling thread starts; None: all usable ones."""
    _of_thread.count = count


def threads() -> int:
    """Return the number of threads for a forward pass that the calling thread starts.

    If none is set, it is the number of processors in the affinity of the process, at most the CPU quota of its
    container and OMP_NUM_THREADS."""
    own: int | None = getattr(_of_thread, "count", None)
    if own:
        return own
    usable = len(os.sched_getaffinity(os.getpid())) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    limit = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0]
    return max(1, min(usable, _quota(int(time.monotonic())), int(limit) if limit.isdecimal() else sys.maxsize))


def fit_torch() -> None:
    """Set torch's number of threads to `threads()`."""
    import torch

    if torch.get_num_threads() != (count := threads()):
        torch.set_num_threads(count)


@functools.lru_cache(maxsize=1)
def _quota(second: int) -> int:
    """Return the CPU quota of the container in processors, rounded up. It is read once in each `second`."""
    return math.ceil(min((_cpu_quota(group) for group in control_groups()), default=sys.maxsize))


def _cpu_quota(group: Path) -> float:
    """Return the CPU quota of a control group, in processors."""
    try:
        quota, period = (group / "cpu.max").read_text().split()
        return max(0.01, int(quota) / int(period))  # "max" if unlimited
    except (OSError, ValueError, ZeroDivisionError):
        return sys.maxsize


@functools.cache
def processor() -> str:
    """Return the processor's name."""
    return processor_info("model name") or platform.processor() or platform.machine()


def processor_info(what: str) -> str:
    """Return a field of /proc/cpuinfo for the first processor; "" if it does not exist."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(what)), "")


@functools.cache
def processor_flags() -> frozenset[str]:
    """Return the features of the processor as Linux names them; on ARM from the bits of getauxval.

    The tiles of AMX count only if the kernel lets this process use them."""
    if platform.machine() == "aarch64" and sys.platform == "linux":
        entry = ctypes.CDLL(None).getauxval
        entry.argtypes, entry.restype = [ctypes.c_ulong], ctypes.c_ulong
        return frozenset(name for name, (number, bit) in _ARM.items() if entry(number) >> bit & 1)
    flags = frozenset(processor_info("flags").split())
    return flags if _TILES.isdisjoint(flags) or _may_use_tiles() else flags - _TILES


def _may_use_tiles() -> bool:
    """Ask the kernel for the registers of AMX's tiles. Returns False if it refuses, or is older than Linux 5.16."""
    arch_prctl, request_permission, tile_data = 158, 0x1023, 18
    return sys.platform == "linux" and not ctypes.CDLL(None).syscall(arch_prctl, request_permission, tile_data)
