"""What a model runs on: in words, and what it can do at most, measured here and now.

A forward can't be faster than reading the weights once, nor than its multiplications: `limit` says which of the two
takes longer. Bytes and operations a second are the best of a few runs, as a limit is what nothing beats.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
import transformers

from tot.decoders.kernels.native import processor

_RUNS = 5
_BYTES = 2**28
_SIZE = 2048


def describe(device: torch.device, dtype: torch.dtype | None = None) -> str:
    """One line: processor or GPU, threads, versions, and a number format."""
    if device.type == "cuda":
        place = torch.cuda.get_device_name(device)
    else:
        place = f"{processor()}, {torch.get_num_threads()} threads"
    told = "" if dtype is None else f", {str(dtype).split('.')[-1]}"
    return f"{place}; torch {torch.__version__}, transformers {transformers.__version__}{told}"


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
