"""Measures of pools of samples: votes, the best by value, and pass@k, also as if fewer samples had been drawn."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import groupby
from statistics import fmean

import numpy as np

from tot.evaluation.pool import Sample
from tot.search.calibration import Calibration, template_of
from tot.search.votes import Ballot, weights_of
from tot.task.call_votes import elected

DRAWS = 100
"""Random subsets of a pool over which votes of fewer samples are averaged."""
SURE = 0.95
"""The replayed `until` of the search auto."""
Pool = Sequence[Sample]
"""The samples of a question, in the order in which they were drawn."""


def measures(pools: Sequence[Pool], calibration: Calibration) -> dict[tuple[str, int], list[tuple[float, float]]]:
    """Return each question's expected score and tokens by (measure, k), such as ("maj@{}", 8).

    k is 1, 2, 4, ... and the most samples of a question; 0 for until. A question with fewer samples counts with all of
    its samples, and a question without samples as 0.

    - maj@k: the score of a majority vote. weighted@k: weighted by value, or by probability if the run had no evaluator.
    - best@k by value, by logprob: the score of the sample with the highest value, or mean log-probability.
    - pass@k: the probability that one of k samples is right, that is, has a score of 1.
    - pass^k: the probability that all of k samples are right.
    - until 0.95: a vote by the probabilities of a calibration, which stops after the first sample with which an answer
      has the probability `SURE`.
    """
    random = np.random.default_rng(0)
    rules: dict[str, Callable[[Pool, int], float]] = {
        "maj@{}": lambda pool, k: vote(pool, [1.0] * len(pool), k, random),
        "weighted@{}": lambda pool, k: vote(pool, _weights(pool), k, random),
        "best@{} by value": lambda pool, k: best(pool, [one.value for one in pool], k),
        "best@{} by logprob": lambda pool, k: best(pool, [one.logprob for one in pool], k),
        "pass@{}": pass_any,
        "pass^{}": pass_all,
    }
    if all(one.value is None for pool in pools for one in pool):
        del rules["best@{} by value"]
    if all(one.logprob is None for pool in pools for one in pool):
        del rules["best@{} by logprob"]
        if "best@{} by value" not in rules:
            del rules["weighted@{}"]
    most = max(map(len, pools), default=0)
    sizes = [*(2**i for i in range(most.bit_length()) if 2**i < most), most]
    found = {}
    for name, rule in rules.items():
        for k in sizes if name in ("maj@{}", "pass@{}") else sizes[1:]:  # equal for one sample
            found[name, k] = [
                (rule(pool, min(k, len(pool))), _tokens(pool) * min(k, len(pool)) / len(pool)) if pool else (0.0, 0.0)
                for pool in pools
            ]
    return found | {(f"until {SURE}", 0): [until_sure(pool, calibration) for pool in pools]}


def vote(pool: Pool, weights: Sequence[float], k: int, random: np.random.Generator) -> float:
    """Return the expected score of the answer with the most weight among k random samples.

    Fewer samples than there are: the mean over `DRAWS` subsets, in which tied answers are equally likely. All samples:
    the first of tied answers wins, as in a search.
    """
    if k == len(pool):
        return _elected(pool, weights)
    if k == 1:
        return fmean(one.score for one in pool)
    score_of = {one.key: one.score for one in pool if one.key is not None}
    votes = np.array([[one.key == key for key in score_of] for one in pool])
    subsets = random.permuted(np.tile(np.arange(len(pool)) < k, (DRAWS, 1)), axis=1)
    totals = np.where(subsets @ votes, subsets @ (votes * np.array(weights)[:, None]), -1.0)  # -1: no vote
    leads = totals >= np.maximum(totals.max(axis=1, initial=0.0, keepdims=True) - 1e-9, 0.0)
    scores = leads @ np.array([*score_of.values()]) / np.maximum(leads.sum(axis=1), 1)
    return float(scores.mean())


def best(pool: Pool, values: Sequence[float | None], k: int) -> float:
    """Return the expected score of the sample with the highest value among k random samples. None is the lowest."""
    ranks = [-math.inf if value is None else value for value in values]
    ranked = sorted(zip(ranks, (one.score for one in pool), strict=True), reverse=True)
    scores: list[float] = []
    for _, group in groupby(ranked, key=lambda pair: pair[0]):
        tied = [score for _, score in group]
        scores += [fmean(tied)] * len(tied)
    subsets = math.comb(len(pool), k)  # of them, comb(n - 1 - i, k - 1) have sample i as the best
    return math.fsum(score * (math.comb(len(pool) - 1 - i, k - 1) / subsets) for i, score in enumerate(scores))


def pass_any(pool: Pool, k: int) -> float:
    """Return the probability that one of k random samples is right (Chen et al., 2021, equation 1)."""
    return 1 - math.comb(len(pool) - _right(pool), k) / math.comb(len(pool), k)


def pass_all(pool: Pool, k: int) -> float:
    """Return the probability that all of k random samples are right (Yao et al., 2024, pass^k)."""
    return math.comb(_right(pool), k) / math.comb(len(pool), k)


def until_sure(pool: Pool, calibration: Calibration) -> tuple[float, float]:
    """Return the score and the tokens of a vote that takes samples in order until it is sure."""
    score, used = 0.0, 0
    for used in range(1, len(pool) + 1):
        probability, score = calibrated(pool[:used], calibration)
        if probability >= SURE:
            break
    return score, _tokens(pool[:used])


def calibrated(pool: Pool, calibration: Calibration) -> tuple[float, float]:
    """Return the probability and the score of the most probable answer; 0 without an answer."""
    ballots = [Ballot(one.key, 1.0, one.source) for one in pool if one.key is not None]
    if not ballots:
        return 0.0, 0.0
    found = calibration.probabilities(ballots, Counter(template_of(one.source) for one in pool))
    leader = max(found, key=lambda key: found[key])
    return found[leader], next(one.score for one in pool if one.key == leader)


def _elected(pool: Pool, weights: Sequence[float]) -> float:
    answered = [(one, weight) for one, weight in zip(pool, weights, strict=True) if one.key is not None]
    winners = elected([one.key for one, _ in answered], [weight for _, weight in answered])
    return answered[winners[0]][0].score if winners else 0.0


def _weights(pool: Pool) -> list[float]:
    values = [one.value for one in pool]
    if all(value is None for value in values):
        values = [None if one.logprob is None else math.exp(one.logprob) for one in pool]
    return weights_of(values)


def _tokens(pool: Pool) -> float:
    return sum(one.tokens for one in pool)


def _right(pool: Pool) -> int:
    return sum(one.score == 1 for one in pool)
