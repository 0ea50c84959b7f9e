"""A mean with its 95% interval: Wilson's for shares, by bootstrap for all else, also for paired differences; and what
is said of repeated measurements."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean, and the ends of its 95% interval."""

    mean: float
    low: float
    high: float

    def format(self, form: str = ".1%") -> str:
        """Such as "31.0% (22.8% to 40.6%)"."""
        return f"{self.mean:{form}} ({self.low:{form}} to {self.high:{form}})"


def estimate(values: Sequence[float]) -> Estimate:
    """The mean of at least one value. Of zeros and ones it is a share, and the interval is Wilson's (1927), which says
    something for none of ten, too; else it is the bootstrap's percentiles (2,000 resamples, always the same ones)."""
    return wilson(float(np.mean(values)), len(values)) if set(values) <= {0.0, 1.0} else bootstrap(values)


def wilson(share: float, count: int) -> Estimate:
    """A share of `count` with its interval. For other means of values from 0 to 1 that one is wider than need be."""
    from scipy.stats import binomtest

    found = binomtest(round(share * count), count).proportion_ci(method="wilson")
    return Estimate(share, float(found.low), float(found.high))


def bootstrap(values: Sequence[float]) -> Estimate:
    """The mean with the bootstrap's percentiles. The differences of pairs make it the paired bootstrap."""
    from scipy.stats import bootstrap as resample

    mean = float(np.mean(values))
    if len(set(values)) < 2:
        return Estimate(mean, mean, mean)
    found = resample((np.asarray(values),), np.mean, n_resamples=2000, batch=50, method="percentile", rng=0)
    return Estimate(mean, float(found.confidence_interval.low), float(found.confidence_interval.high))


def told_apart(judged: Sequence[tuple[float, float]]) -> float | None:
    """The share of pairs of different truth that values put in the right order, ties being worth half (AUROC, where
    truths are 0 and 1), of (truth, value); None where there is no such pair."""
    pairs = [(a, b) for true, a in judged for truth, b in judged if true > truth]
    return statistics.fmean((a > b) + (a == b) / 2 for a, b in pairs) if pairs else None


def spread(values: Sequence[float], form: str = ".1f") -> str:
    """The median of at least one value with the range seen, such as "226.1 (221.0 to 230.4)"."""
    middle = f"{statistics.median(values):{form}}"
    return middle if len(values) == 1 else f"{middle} ({min(values):{form}} to {max(values):{form}})"
