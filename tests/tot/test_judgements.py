"""Parsing of values on a scale, votes and lists from model replies."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tot.task.parsing import parse_proposals, parse_value, parse_vote


def test_the_caller_sets_the_scale() -> None:
    assert parse_value("0.25", 0, 1) == 0.25
    assert parse_value("from 0 to 1: 0.25", 0.0, 1.0) == 0.25
    assert parse_value("from -1 to 1: -0.25", -1, 1) == -0.25
    assert parse_value("70/100", 0, 100) == 70
    assert parse_value("7/10", 0, 100) == 7
    assert parse_value("7/10", 8, 10) is None


@given(
    st.integers(10, 100),
    st.sampled_from(["{}", "{}/10", "{} out of 10.", "**{}**", "Score: {}", "1 to 10: {}", "[{}]", "({})"]),
)
def test_a_value_on_the_scale_is_parsed_in_every_style(tenths: int, style: str) -> None:
    value = tenths / 10
    assert parse_value(style.format(f"{value:g}"), 1, 10) == value


def test_nested_points_are_not_items() -> None:
    assert parse_proposals("1. A piano\n   - it has keys\n2. A map") == ["A piano", "A map"]


def test_lines_with_operators_are_kept_whole() -> None:
    assert parse_proposals("13 - 9 = 4\n-5 + 9 = 4\n4 + 9 = 13") == ["13 - 9 = 4", "-5 + 9 = 4", "4 + 9 = 13"]


@pytest.mark.parametrize("text", ["*" * 50_000, "choice " * 20_000, "1 to " * 20_000, '"' * 50_000, "not 1 " * 20_000])
def test_long_replies_are_parsed_in_linear_time(text: str) -> None:
    assert parse_value(text, 0, 10) in (None, 1)
    assert parse_vote(text, 3) in (None, 1)
    assert isinstance(parse_proposals(text), list)
