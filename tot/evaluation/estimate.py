"""Means with 95% intervals: Wilson's for shares, bootstrap for other values and paired differences. Also AUROC and
medians with ranges."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean with the bounds of its 95% interval."""

    mean: float
    low: float
    high: float

    def format(self, form: str = ".1%") -> str:
        """Format as "31.0% (22.8% to 40.6%)"."""
        return f"{self.mean:{form}} ({self.low:{form}} to {self.high:{form}})"


def estimate(values: Sequence[float]) -> Estimate:
    """Return the mean of at least one value, with its interval.

    If all values are 0 or 1, the interval is Wilson's (1927), which is also meaningful for 0 of 10. Otherwise it is a
    percentile bootstrap of 2,000 resamples with a fixed seed.
    """
    return wilson(float(np.mean(values)), len(values)) if set(values) <= {0.0, 1.0} else bootstrap(values)


def wilson(share: float, count: int) -> Estimate:
    """Return a share of `count` with Wilson's interval, which is conservative for means of other values in [0, 1]."""
    from scipy.stats import binomtest

    interval = binomtest(round(share * count), count).proportion_ci(method="wilson")
    return Estimate(share, float(interval.low), float(interval.high))


def bootstrap(values: Sequence[float]) -> Estimate:
    """Return the mean with a percentile bootstrap interval. Pass paired differences for the paired bootstrap."""
    from scipy.stats import bootstrap as resample

    mean = float(np.mean(values))
    if len(set(values)) < 2:
        return Estimate(mean, mean, mean)
    result = resample((np.asarray(values),), np.mean, n_resamples=2000, batch=50, method="percentile", rng=0)
    return Estimate(mean, float(result.confidence_interval.low), float(result.confidence_interval.high))


def told_apart(judged: Sequence[tuple[float, float]]) -> float | None:
    """Return the share of pairs of different truth that the values rank correctly, from (truth, value) pairs.

    Ties count half. If truths are 0 and 1, this is the AUROC. None if all truths are equal.
    """
    pairs = [(a, b) for true, a in judged for truth, b in judged if true > truth]
    return statistics.fmean((a > b) + (a == b) / 2 for a, b in pairs) if pairs else None


def spread(values: Sequence[float], form: str = ".1f") -> str:
    """Format the median of at least one value with the range, such as "226.1 (221.0 to 230.4)"."""
    median = f"{statistics.median(values):{form}}"
    return median if len(values) == 1 else f"{median} ({min(values):{form}} to {max(values):{form}})"
