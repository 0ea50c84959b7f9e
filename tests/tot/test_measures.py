"""Measures of pools against values worked by hand."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import permutations
from statistics import fmean

import numpy as np
import pytest

from tot.evaluation.measures import best, calibrated, measures, pass_all, pass_any, until_sure, vote
from tot.evaluation.pool import Sample
from tot.search.calibration import Calibration, Source

CALIBRATION = Calibration(
    task=None,
    model=None,
    questions=1,
    none=0.0,
    sources={"chain": Source(weight=3.0, others=-1.0, tokens=10.0)},
    gains=(0.1,),
)
"""An answer with a of n samples has the value (1 + a) ** 3, and no answer the value 1 / (1 + n)."""


def pool(
    answers: Sequence[str | None], values: Sequence[float | None] = (), logprobs: Sequence[float | None] = ()
) -> list[Sample]:
    """Return samples with these answers, of 10 tokens each. "r" is right, and "h" half right."""
    scores = {"r": 1.0, "h": 0.5}
    nothing = [None] * len(answers)
    columns = zip(answers, values or nothing, logprobs or nothing, strict=True)
    return [
        Sample(one, one, scores.get(one or "", 0.0), "chain", 10, value, logprob) for one, value, logprob in columns
    ]


def scores(found: dict[tuple[str, int], list[tuple[float, float]]]) -> dict[str, list[float]]:
    return {name.format(k): [score for score, _ in column] for (name, k), column in found.items()}


@pytest.mark.parametrize(
    ("n", "right", "k", "one", "every"),
    [
        (5, 2, 1, 2 / 5, 2 / 5),
        (5, 2, 2, 1 - 3 / 10, 1 / 10),  # 10 pairs: 3 have no right sample, 1 has two
        (5, 2, 4, 1.0, 0.0),
        (4, 4, 4, 1.0, 1.0),
        (4, 0, 2, 0.0, 0.0),
        (3000, 1, 1500, 0.5, 0.0),  # binomials beyond floats
    ],
)
def test_pass_at_k_and_pass_to_the_k_are_shares_of_all_subsets(
    n: int, right: int, k: int, one: float, every: float
) -> None:
    samples = pool(["r"] * right + ["x"] * (n - right))
    assert pass_any(samples, k) == pytest.approx(one)
    assert pass_all(samples, k) == pytest.approx(every)


def test_only_a_full_score_is_right() -> None:
    assert (pass_any(pool(["h", "h"]), 2), pass_any(pool(["h", "r"]), 2)) == (0.0, 1.0)


def test_the_best_of_k_is_the_mean_over_all_orders() -> None:
    """The first k of each order decide; of equal values, the earlier sample in that order wins."""
    samples, values = pool(["x", "r", "h", None, "r"]), [3.0, 2.0, 2.0, None, -1.0]
    for k in (1, 2, 3, 5):
        firsts = [order[:k] for order in permutations(zip(values, samples, strict=True))]
        expected = fmean(max(some, key=lambda one: -9.0 if one[0] is None else one[0])[1].score for some in firsts)
        assert best(samples, values, k) == pytest.approx(expected)


def test_a_vote_of_fewer_samples_is_the_mean_over_subsets() -> None:
    random = np.random.default_rng(0)
    samples = pool(["r", "r", "r", "x", None])
    assert vote(samples, [1.0] * 5, 1, random) == 0.6
    # Of 10 triples, 7 have two "r" or more, and 3 have one "r", "x" and no answer: a tie of "r" and "x".
    assert vote(samples, [1.0] * 5, 3, random) == pytest.approx(0.7 + 0.3 / 2, abs=0.06)
    # With its weight, "x" wins all 6 triples that have it.
    assert vote(samples, [1.0, 1.0, 1.0, 5.0, 1.0], 3, random) == pytest.approx(0.4, abs=0.1)


def test_a_vote_of_all_samples_elects_as_the_search_does() -> None:
    random = np.random.default_rng(0)
    assert vote(pool(["x", "r", "r", "x"]), [1.0] * 4, 4, random) == 0.0  # the first of a tie
    assert vote(pool(["x", "r", "r", "x"]), [0.1, 0.3, 0.3, 0.1], 4, random) == 1.0
    assert vote(pool([None, None]), [1.0] * 2, 2, random) == 0.0


def test_samples_without_any_answer_or_weight_score_0_or_tie() -> None:
    random = np.random.default_rng(0)
    assert vote(pool([None] * 4), [1.0] * 4, 2, random) == 0.0
    assert vote(pool(["h"] * 4), [0.0] * 4, 2, random) == 0.5


def test_a_vote_until_sure_stops_at_the_first_sample_that_makes_it_sure() -> None:
    assert calibrated(pool(["r"]), CALIBRATION) == (pytest.approx(8 / (8 + 1 / 2)), 1.0)
    assert until_sure(pool(["r", None, "r", "r", "x"]), CALIBRATION) == (1.0, 20)  # 8 / (8 + 1/3) is 0.96
    assert until_sure(pool(["r", "r", "x", "x"]), CALIBRATION) == (1.0, 20)
    assert until_sure(pool(["x", "r"] * 2), CALIBRATION) == (0.0, 40)  # equal: the first wins
    assert until_sure(pool(["x", "r", "r"]), CALIBRATION) == (1.0, 30)
    assert until_sure(pool([None, None]), CALIBRATION) == (0.0, 20)


def test_values_weigh_votes_and_probabilities_do_without_values() -> None:
    by_value = scores(measures([pool(["x", "r", "x"], [0.1, 0.9, 0.2], [-1.0, -9.0, -1.0])], CALIBRATION))
    assert (by_value["maj@3"], by_value["weighted@3"], by_value["until 0.95"]) == ([0.0], [1.0], [0.0])
    assert (by_value["best@3 by value"], by_value["best@3 by logprob"]) == ([1.0], [0.0])
    by_probability = scores(measures([pool(["x", "r", "x"], logprobs=[-3.0, -1.0, -3.0])], CALIBRATION))
    assert (by_probability["weighted@3"], by_probability["until 0.95"]) == ([1.0], [0.0])
    assert "best@3 by value" not in by_probability
    logarithms = scores(measures([pool(["x", "x", "r"], [-5.0, -5.0, -1.0])], CALIBRATION))
    assert logarithms["weighted@3"] == [1.0]


def test_k_grows_to_the_most_samples_and_smaller_questions_count_with_all_of_theirs() -> None:
    found = measures([pool(["r"] * 6), pool(["r", "x", "x"]), pool(["h"]), []], CALIBRATION)
    assert [name.format(k) for name, k in found] == [
        *("maj@1", "maj@2", "maj@4", "maj@6", "pass@1", "pass@2", "pass@4", "pass@6", "pass^2", "pass^4", "pass^6"),
        "until 0.95",
    ]
    assert found["maj@{}", 1] == [(1.0, 10), (pytest.approx(1 / 3), 10), (0.5, 10), (0.0, 0.0)]
    assert found["maj@{}", 6] == [(1.0, 60), (0.0, 30), (0.5, 10), (0.0, 0.0)]
    assert found["pass@{}", 4] == [(1.0, 40), (1.0, 30), (0.0, 10), (0.0, 0.0)]
    assert found["pass^{}", 2] == [(1.0, 20), (0.0, 20), (0.0, 10), (0.0, 0.0)]


def test_equal_samples_have_the_same_score_in_all_measures() -> None:
    assert {
        tuple(column) for column in scores(measures([pool(["r"] * 8, [1.0] * 8, [-1.0] * 8)], CALIBRATION)).values()
    } == {(1.0,)}


def test_questions_without_samples_score_0() -> None:
    assert set(measures([[]], CALIBRATION)["maj@{}", 0]) == {(0.0, 0.0)}
