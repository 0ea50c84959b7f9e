"""State evaluators: Likelihood's expected value from known log-probabilities, and Value's mean of parsed samples."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tot import BFS, Likelihood, Solution, Value, solve
from tot.decoders.request import ChoiceLogprob
from tot.evaluators.likelihood import expected

NEVER = -math.inf
ONE_THOUGHT = BFS(thoughts=1, breadth=1, depth=2)


def evaluate(task: Any, decoder: Any, evaluator: Any, **options: Any) -> Solution:
    """A tree of one thought, "a", and the decoder's replies to "value a"."""
    return solve(task, "q", decoder=decoder, search=ONE_THOUGHT, evaluator=evaluator, **options)


# -- Likelihood -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("probabilities", "value"),
    [
        ({7: 1.0}, 7.0),
        ({3: 0.25, 7: 0.75}, 6.0),
        ({3: 0.025, 7: 0.075}, 6.0),  # a common factor is irrelevant: 90 % may be on other tokens
        ({1: 0.5, 10: 0.5}, 5.5),
        (dict.fromkeys(range(1, 11), 0.1), 5.5),
        ({3: math.exp(-700), 7: 3 * math.exp(-700)}, 6.0),
        ({}, 5.5),
    ],
)
def test_the_value_is_the_expected_number_under_the_model(
    letters: Any, scripted: Any, probabilities: dict[int, float], value: float
) -> None:
    logprobs = [math.log(probabilities[number]) if number in probabilities else NEVER for number in range(1, 11)]
    scores = tuple(ChoiceLogprob(total, 2 if number == 10 else 1) for number, total in enumerate(logprobs, 1))
    reply = scripted.completion("", "stop", 0, choice_logprobs=scores)
    solution = evaluate(letters, scripted({"grow": "a", "value a": reply}), Likelihood())
    assert solution.tree[1].value == pytest.approx(value)
    assert solution.parse_failures == 0


@given(st.lists(st.floats(-1e4, 0) | st.just(NEVER), min_size=10, max_size=10), st.floats(-1e3, 1e3))
def test_an_expected_value_is_on_the_scale_and_ignores_a_common_factor(logprobs: list[float], shift: float) -> None:
    value = expected(range(1, 11), logprobs)
    assert 1 <= value <= 10
    assert expected(range(1, 11), [logprob + shift for logprob in logprobs]) == pytest.approx(value, abs=1e-6)


# -- Value ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("replies", "value", "failures"),
    [
        (["4", "8"], 6.0, 0),
        (["I say 7.", "10"], 8.5, 0),
        (["4", "no"], 2.5, 1),  # the default is 1
        (["no", "none"], 1.0, 2),
        (["0", "11, no: 9"], 5.0, 1),
        (["7.5 out of 10", "2"], 4.75, 0),
    ],
)
def test_the_value_is_the_mean_of_the_samples(
    letters: Any, scripted: Any, replies: list[str], value: float, failures: int
) -> None:
    solution = evaluate(letters, scripted({"grow": "a", "value a": replies}), Value(samples=2, temperature=0.7))
    assert solution.tree[1].value == pytest.approx(value)
    assert solution.parse_failures == solution.tree[1].parse_failures == failures


def test_a_sample_cut_off_by_a_budget_leaves_no_value(letters: Any, scripted: Any) -> None:
    replies = ["4", scripted.completion("1", "budget")]
    solution = evaluate(letters, scripted({"grow": "a", "value a": replies}), Value(samples=2))
    assert solution.tree[1].value is None
    assert solution.parse_failures == 0
