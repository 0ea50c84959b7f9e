"""Parsing of values on a scale, votes and lists from model replies."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tot.task.parsing import parse_proposals, parse_value, parse_vote


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
def test_a_value_is_parsed_from_common_wordings(text: str, value: float) -> None:
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
        ("From 1 (bad) to 10 (good): 2", 2),
        ("Out of 10, I'd give it 9.", 9),
        ("Score (out of 10): 8", 8),
        ("1 to 10", None),
        ("21 - 10 are left", 10),  # not a mention of the scale
        ("7/100 of them, so 8/10", 8),
        ("7 out of 10.5, so 8 out of 10", 8),
    ],
)
def test_mentions_of_the_scale_are_not_values(text: str, value: float | None) -> None:
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
def test_a_leading_value_wins_over_a_marked_one_and_a_marked_one_over_a_plain_one(text: str, value: float) -> None:
    assert parse_value(text, 1, 10) == value


@pytest.mark.parametrize("text", ["", "good", "I rate 15", "-5", "0", "10.5", "70/100", "1e9", "9" * 400, "٧"])
def test_a_reply_without_a_number_on_the_scale_has_no_value(text: str) -> None:
    assert parse_value(text, 1, 10) is None


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


@pytest.mark.parametrize(
    ("reply", "vote"),
    [
        ("2", 2),
        ("**2**", 2),
        ("My vote: [[2]]", 2),
        ("2. Candidate 1 forgets the tip.", 2),
        ("Choice 2, because choice 1 adds wrong.", 2),
        ("I looked at 2 first, but the best choice is 1.", 1),
        ("Option 1 is better than option 2.", 1),
        ("Choice 1 is worse than choice 2.", 2),
        ("I choose 2 over 1 and 3.", 2),
        ("The answer is choice 2, not choice 3.", 2),
        ("Neither 1 nor 2; I choose 3.", 3),
        ("Choice 1 is short. Choice 2 is wrong. Choice 3 is right. So 3.", 3),
        ("1: clear. 2: wrong. 3: vague.\nBest: 1", 1),
        ("Not 1. 2.", 2),
        ("4", None),
        ("none of them", None),
    ],
)
def test_a_vote_is_the_candidate_that_the_reply_selects(reply: str, vote: int | None) -> None:
    assert parse_vote(reply, 3) == vote


@pytest.mark.parametrize(
    "reply",
    [
        "A piano\nA map\nA clock",
        "Here are three ideas:\n1. A piano\n2. A map\n3. A clock\n\nLet me know if you need more!",
        "Sure!\n\n- A piano\n- A map\n- A clock",
        "Ideas:\nA piano\nA map\nA clock",
        "**1. A piano**\n**2. A map**\n**3. A clock**",
        "1. **A piano**\n2. **A map**\n3. **A clock**",
        "a) A piano\nb) A map\nc) A clock",
        "i. A piano\nii. A map\niii. A clock",
        "Idea 1: A piano\nIdea 2: A map\nIdea 3: A clock",
        "- [ ] A piano\n- [ ] A map\n- [ ] A clock",
        "```\nA piano\nA map\nA clock\n```",
        "> A piano\n> A map\n> A clock",
        '"A piano"\n"A map"\n"A clock"',
    ],
)
def test_a_list_is_its_items_without_marks_or_introduction(reply: str) -> None:
    assert parse_proposals(reply) == ["A piano", "A map", "A clock"]


def test_nested_points_are_not_items() -> None:
    assert parse_proposals("1. A piano\n   - it has keys\n2. A map") == ["A piano", "A map"]


def test_lines_with_operators_are_kept_whole() -> None:
    assert parse_proposals("13 - 9 = 4\n-5 + 9 = 4\n4 + 9 = 13") == ["13 - 9 = 4", "-5 + 9 = 4", "4 + 9 = 13"]


@pytest.mark.parametrize("text", ["*" * 50_000, "choice " * 20_000, "1 to " * 20_000, '"' * 50_000, "not 1 " * 20_000])
def test_long_replies_are_parsed_in_linear_time(text: str) -> None:
    assert parse_value(text, 0, 10) in (None, 1)
    assert parse_vote(text, 3) in (None, 1)
    assert isinstance(parse_proposals(text), list)
