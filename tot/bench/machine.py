"""What a benchmark ran on, and how its numbers are shown: both sides, the ratio of medians, the spread."""

from __future__ import annotations

import platform
import statistics
from collections.abc import Sequence
from pathlib import Path

import torch
import transformers


def describe(device: torch.device, dtype: torch.dtype) -> str:
    """One line: processor or GPU, threads, versions, number format."""
    if device.type == "cuda":
        place = torch.cuda.get_device_name(device)
    else:
        place = f"{processor()}, {torch.get_num_threads()} threads"
    return f"{place}; torch {torch.__version__}, transformers {transformers.__version__}, {str(dtype).split('.')[-1]}"


def processor() -> str:
    """The processor's name, as the system tells it."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def spread(values: Sequence[float], digits: int = 1) -> str:
    """Median with the range seen, such as "226.1 (221.0 to 230.4)"."""
    middle = f"{statistics.median(values):.{digits}f}"
    return middle if len(values) == 1 else f"{middle} ({min(values):.{digits}f} to {max(values):.{digits}f})"


def share(values: Sequence[float]) -> str:
    """A mean in percent with its 95% interval, by bootstrap."""
    if len(set(values)) < 2:
        return f"{100 * values[0]:.0f}%" if values else ""
    low, high = interval(values)
    return f"{100 * statistics.fmean(values):.0f}% ({100 * low:.0f} to {100 * high:.0f})"


def interval(values: Sequence[float]) -> tuple[float, float]:
    """95% interval of a mean, by bootstrap; of paired differences, too."""
    if len(set(values)) < 2:
        return values[0], values[0]
    from scipy.stats import bootstrap

    found = bootstrap((values,), statistics.fmean, vectorized=False, n_resamples=2000, rng=0).confidence_interval
    return float(found.low), float(found.high)
