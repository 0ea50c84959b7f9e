"""Votes of calls and objects: functions first, then each argument in its canonical form."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tot.decoders import ToolCall
from tot.task.call_votes import canonical, elect


def call(name: str, arguments: str = "{}") -> tuple[ToolCall, ...]:
    return (ToolCall(name=name, arguments=arguments),)


def winner(*answers: Any, weights: Any = None) -> Any:
    return answers[elect(answers, weights or [1.0] * len(answers))[1]]


@pytest.mark.parametrize(
    ("left", "right"),
    [
        ('{"a": 1}', '{"a":1.0}'),
        ('{"a": 1e3, "b": -0.0}', '{"b": 0, "a": 1000}'),
        ('{"a": {"x": [1, {"p": 2, "q": 3}]}}', '{"a": {"x": [1.0, {"q": 3, "p": 2}]}}'),
        ('{"a": " Rome\\n"}', '{"a": "Rome"}'),
        ('{"a": "\\u00e9"}', '{"a": "é"}'),
    ],
)
def test_equal_arguments_share_a_key(left: str, right: str) -> None:
    (one, other), _ = elect([call("f", left), call("f", right)], [1, 1])
    assert one == other


@pytest.mark.parametrize(
    ("left", "right"),
    [
        ('{"a": 1}', '{"a": "1"}'),
        ('{"a": 1}', '{"a": true}'),
        ('{"a": null}', "{}"),
        ('{"a": [1, 2]}', '{"a": [2, 1]}'),
        ('{"a": "Rome"}', '{"a": "rome"}'),
        ('{"a": "R ome"}', '{"a": "R  ome"}'),
        ('{"a": 9007199254740993}', '{"a": 9007199254740992}'),
        ('{"a": 1e400}', '{"a": 1e300}'),
        ('{"a": "b"}', '{"b": "a"}'),
    ],
)
def test_different_arguments_have_different_keys(left: str, right: str) -> None:
    (one, other), _ = elect([call("f", left), call("f", right)], [1, 1])
    assert one != other


def test_functions_vote_before_arguments() -> None:
    calls = [call("g", '{"x": 1}'), call("g", '{"x": 1}'), *(call("f", f'{{"x": {i}}}') for i in range(3))]
    keys, index = elect(calls, [1, 1, 1, 1, 1])
    assert keys[0] == keys[1]
    assert calls[index] == call("f", '{"x": 0}')
    assert calls[elect(calls, [2, 2, 1, 1, 1])[1]] == calls[0]


def test_the_elected_call_has_the_most_winning_arguments() -> None:
    calls = [
        call("f", '{"a": 1, "b": 9, "c": 1}'),
        call("f", '{"a": 1, "b": 2, "c": 7}'),
        call("f", '{"a": 5, "b": 2, "c": 1}'),
        call("f", '{"a": 1, "b": 2, "c": 1}'),
    ]
    keys, index = elect(calls, [1, 1, 1, 1])
    assert index == 3
    assert len(set(keys)) == 4
    assert elect(calls[:3], [1, 1, 1])[1] == 0  # all have two of three
    assert elect(calls[:3], [1, 1, 1.5])[1] == 2  # their weights decide


def test_a_missing_argument_is_a_value() -> None:
    calls = [call("f", '{"a": 1, "unit": "C"}'), call("f", '{"a": 1}'), call("f", '{"a": 1}')]
    assert winner(*calls) == calls[1]


def test_calls_of_one_turn_have_no_order() -> None:
    one, other = (*call("f", '{"a": 1}'), *call("g")), (*call("g"), *call("f", '{"a": 1.0}'))
    keys, _ = elect([one, other, call("f", '{"a": 1}')], [1, 1, 1])
    assert keys[0] == keys[1] != keys[2]
    twice = (*call("f", '{"a": 2}'), *call("f", '{"a": 1}'))
    assert winner(call("f", '{"a": 1}'), twice, twice[::-1]) == twice


def test_texts_calls_and_objects_are_different_ballots() -> None:
    answers = ["f", call("f"), {"f": 1}, ["f"], "f "]
    keys, index = elect(answers, [1, 1, 1, 1, 1])
    assert len(set(keys)) == 4
    assert answers[index] == "f"
    assert winner(*answers, weights=[1, 3, 1, 1, 1]) == call("f")


def test_objects_vote_by_field_and_other_values_whole() -> None:
    objects = [{"a": 1, "b": [1]}, {"a": 1.0, "b": [2]}, {"b": [1.0], "a": 3}, {"a": 1, "b": [1]}]
    keys, index = elect(objects, [1, 1, 1, 0.5])
    assert keys[0] == keys[3] != keys[1]
    assert index == 0
    assert winner([1, 2], [2, 1], [1.0, 2]) == [1, 2]
    assert winner(True, 1, 1.0) == 1


def test_arguments_that_a_limit_cut_are_a_value() -> None:
    cut = call("f", '{"a": "Ro')
    assert winner(call("f", '{"b": 1}'), cut, cut) == cut
    assert winner(call("f", "[" * 5000), call("f", "[" * 5000)) == call("f", "[" * 5000)


_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(st.lists(_VALUES | st.dictionaries(st.text(), _VALUES), min_size=1, max_size=5), st.data())
def test_any_values_have_an_elected_one(values: list[Any], data: st.DataObject) -> None:
    weights = data.draw(st.lists(st.floats(0, 1e6), min_size=len(values), max_size=len(values)))
    keys, index = elect(values, weights)
    assert len({*keys}) <= len(values)
    assert 0 <= index < len(values)
    assert [canonical(one) for one in values] == [canonical(one) for one in values]
