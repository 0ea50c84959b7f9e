"""Memory: how much of it is free on a device, and giving back what is no longer used."""

from __future__ import annotations

import ctypes
import gc
import sys
from pathlib import Path

import psutil
import torch

from tot.decoders.containers import control_groups


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
