"""How a benchmark's numbers are shown: both sides, the ratio of medians, the spread."""

from __future__ import annotations

import statistics
from collections.abc import Sequence


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
