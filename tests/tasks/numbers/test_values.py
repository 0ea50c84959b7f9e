"""Values on a scale, as models say them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tot.tasks.numbers import parse_value


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("7", 7),
        ("10", 10),
        ("1", 1),
        (" 7.\n\nQuestion: score 3", 7),
        ("**9**", 9),
        ("[6]", 6),
        ("\\boxed{6}", 6),
        ("8.5", 8.5),
        ("7/10", 7),
        ("7 / 10", 7),
        ("10/10", 10),
        ("1/10", 1),
        ("7.5 out of 10.", 7.5),
        ("The number is: 8.", 8),
        ("The number is **8**", 8),
        ("Score: 8.5", 8.5),
        ("Rating (1-10): 6", 6),
        ("I'd give it 7", 7),
    ],
)
def test_a_value_is_read_from_how_models_say_it(text: str, value: float) -> None:
    assert parse_value(text, 1, 10) == value


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("On a scale of 1 to 10, I'd give it 7", 7),
        ("between 1 and 10: 7", 7),
        ("1-10: 7", 7),
        ("1 – 10: 7", 7),
        ("with 1 being useless and 10 being perfect, 7", 7),
        ("on a scale of 10, 7", 7),
        ("On a 10-point scale, 7", 7),
        ("out of 10, 7", 7),
        ("7 on a scale from 1 to 10", 7),
        ("1 to 10", None),
        ("21 - 10 are left", 10),  # no mention of it
        ("7/100 of them, so 8/10", 8),
        ("7 out of 10.5, so 8 out of 10", 8),
    ],
)
def test_mentions_of_the_scale_are_no_value(text: str, value: float | None) -> None:
    assert parse_value(text, 1, 10) == value


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("It has 2 steps. Score: 9", 9),
        ("It has 2 steps, so 9/10.", 9),
        ("3 of 4 steps are right: a rating of 6", 6),
        ("4 + 3 = 7 is right. The number is 9.", 9),
        ("8. The score is not 3.", 8),
        ("Score: 15, value: 8", 8),
        ("It multiplies 12 by 34, so 8", 8),
        ("5 then 6", 5),
    ],
)
def test_an_opening_value_wins_over_a_marked_one_and_that_over_a_plain_one(text: str, value: float) -> None:
    assert parse_value(text, 1, 10) == value


@pytest.mark.parametrize("text", ["", "good", "I rate 15", "-5", "0", "10.5", "70/100", "1e9", "9" * 400, "٧"])
def test_no_number_on_the_scale_is_no_value(text: str) -> None:
    assert parse_value(text, 1, 10) is None


def test_the_scale_is_the_callers() -> None:
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
def test_a_value_on_the_scale_is_found_in_every_style(tenths: int, style: str) -> None:
    value = tenths / 10
    assert parse_value(style.format(f"{value:g}"), 1, 10) == value
