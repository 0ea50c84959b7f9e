"""Reliability of certainties: the expected calibration error (Naeini et al., 2015), and the score by coverage."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

BINS = 10
COVERAGES = (100, 75, 50, 25)


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
    """Expected calibration error: the mean distance of certainty and score over the bins, weighted by samples."""
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
