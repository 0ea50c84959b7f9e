"""Means with 95% intervals: Wilson's for shares, bootstrap for other values and paired differences. Also the
calibration of certainties.

A bootstrap of few or equal values is too narrow. Then scores get Wilson's interval, paired differences of scores Bonett
and Price's (2012), and other values Student's.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

BINS = 10
COVERAGES = (100, 75, 50, 25)
_FEW = 10
"""Fewer values than this have no bootstrap interval."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean with the bounds of its 95% interval."""

    mean: float
    low: float
    high: float

    def format(self, form: str = ".1%") -> str:
        """Format as "31.0% (22.8% to 40.6%)"."""
        if not math.isfinite(self.high):
            return f"{self.mean:{form}} (one value)"
        if self.low == self.high:
            return f"{self.mean:{form}} (all equal)"
        return f"{self.mean:{form}} ({self.low:{form}} to {self.high:{form}})"


def estimate(scores: Sequence[float]) -> Estimate:
    """Return the mean of at least one score from 0 to 1, with its interval.

    If all scores are 0 or 1, few or equal, the interval is Wilson's (1927), which is also meaningful for 0 of 10.
    Otherwise it is a percentile bootstrap of 2,000 resamples with a fixed seed.
    """
    if set(scores) <= {0.0, 1.0} or _too_few(scores):
        return wilson(float(np.mean(scores)), len(scores))
    return bootstrap(scores)


def wilson(share: float, count: int) -> Estimate:
    """Return a share of `count` with Wilson's interval, which is conservative for means of other values in [0, 1]."""
    z = statistics.NormalDist().inv_cdf(0.975)
    center = (share + z * z / (2 * count)) / (1 + z * z / count)
    half = z * math.sqrt(share * (1 - share) / count + (z / (2 * count)) ** 2) / (1 + z * z / count)
    return Estimate(share, min(max(center - half, 0.0), share), max(min(center + half, 1.0), share))


def paired(differences: Sequence[float]) -> Estimate:
    """Return the mean of at least one paired difference of scores, from -1 to 1, with its interval."""
    if not _too_few(differences):
        return bootstrap(differences)
    padded = [*differences, 1.0, -1.0]  # Bonett and Price (2012), equation 3: one more pair of each disagreement
    error = 1.96 * math.sqrt(statistics.pvariance(padded) / len(padded))
    center = statistics.fmean(padded)
    return Estimate(float(np.mean(differences)), max(center - error, -1.0), min(center + error, 1.0))


def bootstrap(values: Sequence[float]) -> Estimate:
    """Return the mean of any values with a percentile bootstrap interval; Student's if the values are few.

    One value has no interval: its bounds are infinite.
    """
    from scipy import stats

    mean, count = float(np.mean(values)), len(values)
    if count == 1:
        return Estimate(mean, -math.inf, math.inf)
    if _too_few(values):
        half = float(stats.t.ppf(0.975, count - 1) * stats.sem(values))
        return Estimate(mean, mean - half, mean + half)
    result = stats.bootstrap((np.asarray(values),), np.mean, n_resamples=2000, batch=50, method="percentile", rng=0)
    return Estimate(mean, float(result.confidence_interval.low), float(result.confidence_interval.high))


def _too_few(values: Sequence[float]) -> bool:
    return len(values) < _FEW or len(set(values)) == 1


@dataclass(frozen=True, slots=True)
class Bin:
    """Samples whose certainties are in one of ten equal parts of 0 to 1."""

    certainty: float
    """The mean."""
    score: float
    samples: int


@dataclass(frozen=True, slots=True)
class Reliability:
    """How well certainties predict scores."""

    samples: int
    """Number of samples with a certainty."""
    error: float
    """Expected calibration error (Naeini et al., 2015): the mean distance of certainty and score over the
    bins, weighted by samples."""
    bins: list[Bin]
    """The bins that have samples."""
    score_at_coverage: dict[int, float]
    """By percentage: the score of this share of all samples, the most certain first."""


def reliability(certainties: Sequence[float | None], scores: Sequence[float]) -> Reliability | None:
    """Measure certainties against scores, both by sample; None if no certainty is known.

    In the coverage, samples without a certainty are the least certain. Equal certainties share their mean score.
    """
    known = np.array([one is not None for one in certainties])
    if not known.any():
        return None
    sure, truth = np.array([-1.0 if one is None else one for one in certainties]), np.asarray(scores, dtype=float)
    places = np.minimum(sure * BINS, BINS - 1).astype(int)
    bins = [
        Bin(float(sure[inside].mean()), float(truth[inside].mean()), int(inside.sum()))
        for place in range(BINS)
        if (inside := known & (places == place)).any()
    ]
    coverage = {share: surest(sure.tolist(), scores, share) for share in COVERAGES}
    error = sum(one.samples * abs(one.certainty - one.score) for one in bins) / int(known.sum())
    return Reliability(int(known.sum()), error, bins, coverage)


def surest(certainties: Sequence[float], scores: Sequence[float], percent: float) -> float:
    """Return the mean score of the most certain `percent` of at least one sample, at least one sample of them."""
    _, group, sizes = np.unique(-np.asarray(certainties), return_inverse=True, return_counts=True)
    means = np.bincount(group, weights=scores) / sizes
    count = max(round(len(group) * percent / 100), 1)
    return float(means[np.sort(group)[:count]].mean())
