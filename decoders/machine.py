"""The machine: processor or GPU, free memory, a container's limits, and how fast a forward can be at most.

A forward takes at least as long as reading its weights once, and as its multiplications: `limit` returns the longer of
the two. Bytes and operations per second are the best of a few runs.
"""

from __future__ import annotations

import ctypes
import functools
import gc
import logging
import math
import platform
import sys
import time
from collections.abc import Callable
from pathlib import Path, PurePosixPath

import psutil
import torch

_RUNS = 5
_BYTES = 2**28
_SIZE = 2048


def describe(device: torch.device, dtype: torch.dtype | None = None) -> str:
    """One line: processor or GPU, threads, versions, and a number format."""
    import transformers  # seconds, which only this line needs

    if device.type == "cuda":
        place = torch.cuda.get_device_name(device)
    else:
        place = f"{processor()}, {torch.get_num_threads()} threads"
    number_format = "" if dtype is None else f", {str(dtype).split('.')[-1]}"
    return f"{place}; torch {torch.__version__}, transformers {transformers.__version__}{number_format}"


def read_bandwidth(device: str | torch.device = "cpu", size: int = _BYTES) -> float:
    """Bytes a second at which all threads read memory: a sum over `size` bytes, which should be more than caches hold.

    For a limit on reading weights, give their size: what a cache holds of those is read faster, here as there.
    """
    values = torch.ones(size // 8, dtype=torch.int64, device=device)  # integers: their sum is vectorised and plain
    return size / _best(values.sum, device)


def matrix_rate(dtype: torch.dtype = torch.bfloat16, device: str | torch.device = "cpu", size: int = _SIZE) -> float:
    """Floating-point operations a second of a product of two `size` x `size` matrices (2 size³ of them)."""
    left, right = (torch.rand(size, size, device=device).to(dtype) for _ in range(2))
    return 2 * size**3 / _best(lambda: left @ right, device)


def limit(weight_bytes: float, operations: float, bandwidth: float, rate: float) -> float:
    """Seconds that a forward takes at least: reading its weights (bytes), or its operations, whichever is longer."""
    return max(weight_bytes / bandwidth, operations / rate)


def _best(work: Callable[[], object], device: str | torch.device) -> float:
    """Seconds of the fastest run, after one that warms up."""
    times = []
    with torch.inference_mode():
        for _ in range(_RUNS + 1):
            began = time.perf_counter()
            work()
            if torch.device(device).type == "cuda":
                torch.cuda.synchronize(device)
            times.append(time.perf_counter() - began)
    return min(times[1:])


def free_memory(device: torch.device) -> int:
    """Bytes that can still be had on a device; on the CPU no more than a container's limit leaves."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return min(int(psutil.virtual_memory().available), sys.maxsize, *map(_left_to, control_groups()))


def give_back() -> None:
    """Collect what nobody refers to, and return it to the system: glibc keeps what was freed below 32 MiB, which a
    model's weights mostly are."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # not every C library has it
        if trim is not None:
            trim(0)


def _left_to(group: Path) -> int:
    """What a control group leaves of its limit."""
    try:
        limit = int((group / "memory.max").read_text())  # "max" where there is none
        used = int((group / "memory.current").read_text())
        counts = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        return max(0, limit - used + int(counts.get("inactive_file", 0)))  # the system drops cached files first
    except (OSError, ValueError):
        return sys.maxsize


log = logging.getLogger(__name__)
_GROUPS = Path("/sys/fs/cgroup")
_OWN_GROUP = Path("/proc/self/cgroup")


def control_groups() -> list[Path]:
    """The folders of the group of this process and of those that it is in; none where there are no groups."""
    try:
        own = next(line[3:] for line in _OWN_GROUP.read_text().splitlines() if line.startswith("0::"))
    except (OSError, StopIteration):
        return []
    inner = PurePosixPath(own.lstrip("/"))
    return [_GROUPS / group for group in (inner, *inner.parents)]


def fit_threads() -> None:
    """Compute with no more threads than a container has time for: they wait for each other many times in a forward, and
    where two share half a processor that is what they spend it on."""
    allowed = math.ceil(min((_processors(group) for group in control_groups()), default=sys.maxsize))
    if allowed < torch.get_num_threads():
        log.info("%d threads compute, as this container has no time for more", allowed)
        torch.set_num_threads(allowed)


def _processors(group: Path) -> float:
    """As many as would use up what a group may in a period."""
    try:
        quota, period = (group / "cpu.max").read_text().split()
        return max(0.01, int(quota) / int(period))  # "max" where there is no quota
    except (OSError, ValueError, ZeroDivisionError):
        return sys.maxsize


@functools.cache
def processor() -> str:
    """The processor's name, as the system tells it."""
    return processor_info("model name") or platform.processor() or platform.machine()


def processor_info(what: str) -> str:
    """What Linux says of the first processor; "" elsewhere."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(what)), "")
