"""Numbers in a model's text: tables of replies as models write them, and properties over any text."""

from decimal import Decimal

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tot.tasks.numbers import flexible_answer, normalize, parse_value, same_number, strict_answer


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("She sold 48/2 = <<48/2=24>>24.\n#### 72", "72"),
        ("#### 18.", "18"),
        ("#### $1,234.50", "1234.5"),
        ("#### 1,000,000", "1000000"),
        ("#### -5", "-5"),
        ("#### −5", "-5"),
        ("#### $-5", "-5"),
        ("#### -$5", "-5"),
        ("#### \\$ 5", "5"),
        ("#### .5", "0.5"),
        ("####18", "18"),
        ("#### 18 dollars, of 20", "18"),
        ("#### 1\nwait, no\n#### 2\n3", "2"),
        ("#### 7\n#### none", "7"),
        ("#### -0", "0"),
        ("#### x", None),
        ("####\n5", None),
        ("### 5", None),
        ("The answer is 18.", None),
        ("", None),
    ],
)
def test_strict_answer_is_the_number_after_the_last_marker(text: str, answer: str | None) -> None:
    assert strict_answer(text) == answer


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("The answer is 18", "18"),
        ("5 + 3 = 8.", "8"),
        ("Tom has 5 apples.", "5"),
        ("It costs $1,234.50", "1234.5"),
        ("It costs 1,234.50$", "1234.5"),
        ("first 7, then 5%.", "5"),
        ("1, 2, 3", "3"),
        ("1,2,3", "3"),
        ("12,34", "34"),
        ("1,2345", "2345"),
        ("1234,567", "567"),
        ("1,234,567", "1234567"),
        ("3.5.", "3.5"),
        (".5", "0.5"),
        ("$.50", "0.5"),
        ("wait...5", "5"),
        ("007", "7"),
        ("#### 18", "18"),
        ("1/2", "2"),
        ("1e5", "100000"),
        ("1.5e-3", "0.0015"),
        ("1e5.", "100000"),
        ("1e999", "999"),
        ("1.2.3", "3"),
        ("18:30", "30"),
        ("36 cm^2", "36"),
        ("36 cm^{2}", "36"),
        ("9" * 60, "9" * 60),
        ("five", None),
        ("", None),
        ("- . , $ % #### ^2", None),
    ],
)
def test_flexible_answer_is_the_last_number(text: str, answer: str | None) -> None:
    assert flexible_answer(text) == answer


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("-5", "-5"),
        ("−5", "-5"),
        ("-.5", "-0.5"),
        ("$-5", "-5"),
        ("-$5", "-5"),
        ("−$1,000", "-1000"),
        ("-\\$5", "-5"),
        ("(-5)", "-5"),
        ("= -5", "-5"),
        ("=-5", "-5"),
        ("**-5**", "-5"),
        ("10-3", "3"),
        ("10−3", "3"),
        ("$10-$3", "3"),
        ("$10$-$3$", "3"),
        ("50%-20%", "20"),
        ("(4+6)-3", "3"),
        ("10 - 3", "3"),
        ("5–10", "10"),
        ("step-3", "3"),
        ("--3", "3"),
        ("- 5 apples", "5"),
    ],
)
def test_a_minus_is_a_sign_only_where_it_cannot_be_an_operator_or_a_hyphen(text: str, answer: str) -> None:
    assert flexible_answer(text) == answer


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("The answer is 18. She has 4 left.", "18"),
        ("the final ANSWER is: $18 (of 20)", "18"),
        ("Answer: 18\nQuestion: Tom has 5", "18"),
        ("**Answer:** **-$5** and 8", "-5"),
        ("The answer is 5. No, the answer is 6, not 7.", "6"),
        ("The answer is therefore 18, after 2 days", "18"),
        ("The answer to the question is 18, not 4", "18"),
        ("The answer would be about 18, 4 less", "18"),
        ("answer = 1,000 for 3", "1000"),
        ("The answer is \\(18\\) for 3", "18"),
        ("so \\boxed{18} for 3 days", "18"),
        ("\\boxed{\\$1,234.50} 3", "1234.5"),
        ("\\boxed{36\\text{ cm}^2} 3", "36"),
        ("\\boxed{2x = 18} 3", "18"),
        ("\\boxed{5}, that is, \\boxed{none} 3", "5"),
        ("The answer is 5, or rather \\boxed{6}", "6"),
        ("\\boxed{6}, so the answer is 5 for 3", "5"),
        ("The answer is $\\boxed{18}$ for 3", "18"),
    ],
)
def test_an_announced_answer_wins_over_a_later_number(text: str, answer: str) -> None:
    assert flexible_answer(text) == answer


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("The answer is 2 x 9 = 18. Then 5", "18"),
        ("The answer is 18 = 2 x 9, then 5", "18"),
        ("The answer is 5 apples + 3 apples = 8 apples, 9 at most", "8"),
        ("The answer is (5 + 3) * 2 = 16 in 4 days", "16"),
        ("The answer is $5 \\times 3 = 15$ in 4 days", "15"),
        ("The answer is 50% of 8", "50"),
        ("The answer is 3^2 x 4 = 36 in 2 days", "36"),
        ("The answer is 10-3, 8", "3"),
        ("The answer is 18 (16 + 2 = 18) - 5", "18"),
        ("The answer is 18 because 16 + 3 = 19", "18"),
    ],
)
def test_an_announced_equation_counts_as_its_result(text: str, answer: str) -> None:
    assert flexible_answer(text) == answer


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("Sub-answer: 24\nand 3 more make 27", "27"),
        ("Sub answer: 24\nand 3 more make 27", "27"),
        ("The answer is not 5 but 6", "6"),
        ("The answer is:\n1. Tom has 4\n2. so 8", "8"),
        ("answers: 5 or 6", "6"),
        ("\\boxed{18 of 20", "20"),
    ],
)
def test_what_is_no_announcement_leaves_the_last_number(text: str, answer: str) -> None:
    assert flexible_answer(text) == answer


@pytest.mark.parametrize(
    ("number", "canonical"),
    [
        ("18.0", "18"),
        ("-0", "0"),
        ("-0.00", "0"),
        ("1,000", "1000"),
        ("007", "7"),
        ("0.50", "0.5"),
        (".5", "0.5"),
        ("100", "100"),
        ("$1,234.50", "1234.5"),
        ("-$5", "-5"),
        ("$-5", "-5"),
        ("$ 5", "5"),
        ("+5", "5"),
        ("−5", "-5"),
        ("50%", "50"),
        (" 18. ", "18"),
        ("1e3", "1000"),
        ("1e-3", "0.001"),
        ("1" + "0" * 5000, "1" + "0" * 5000),
        ("-0." + "1" * 5000, "-0." + "1" * 5000),
    ],
)
def test_normalize_writes_one_canonical_text(number: str, canonical: str) -> None:
    assert normalize(number) == canonical
    assert normalize(canonical) == canonical


@pytest.mark.parametrize(
    "number", ["", " ", "five", "1,00", "1,2", "1 2", "1.2.3", "10-3", "1/2", "nan", "inf", "٣", "1_0"]
)
def test_normalize_refuses_what_is_not_one_number(number: str) -> None:
    with pytest.raises(ValueError, match="is not one number"):
        normalize(number)
    assert not same_number(number, number)


@pytest.mark.parametrize(
    ("a", "b", "same"),
    [
        ("18", "18.0", True),
        ("$1,000", "1000", True),
        ("-0", "0", True),
        ("1e3", "1,000", True),
        ("−5", "-5", True),
        ("0.1", "0.10", True),
        ("18", "-18", False),
        ("50%", "0.5", False),
        ("9007199254740993", "9007199254740992", False),  # equal as floats
        ("1" * 400, "1" * 399 + "2", False),
        (None, "5", False),
        (None, None, False),
        ("x", "5", False),
    ],
)
def test_same_number_compares_exactly(a: str | None, b: str | None, same: bool) -> None:
    assert same_number(a, b) is same
    assert same_number(b, a) is same


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


HOSTILE = [
    "1,",
    "-",
    "$",
    "5",
    "#### ",
    "answer to ",
    "answer is 5 x ",
    "\\boxed{",
    "\\boxed{}{}",
    "5 apples + ",
    "number is is ",
    "1 being ",
]


@pytest.mark.parametrize("piece", HOSTILE)
def test_a_million_hostile_characters_are_read_in_one_go(piece: str) -> None:
    """Quadratic matching would take hours here."""
    text = piece * (1_000_000 // len(piece))
    last = {"1,": "1", "5": text, "answer is 5 x ": "5", "5 apples + ": "5", "1 being ": "1"}
    assert flexible_answer(text) == last.get(piece)
    assert strict_answer(text) is None
    assert parse_value(text, 20, 30) is None


def test_a_million_hostile_characters_after_an_announced_number_are_not_its_equation() -> None:
    for piece in (" ", "a", "(", "a ", "^", "{1}", "%"):
        assert flexible_answer("the answer is 7" + piece * (1_000_000 // len(piece))) == "7"


# Pieces that the patterns look for (between bars), in any order, and any text between them.
BARRED = "#### |answer is |answer: |\\boxed{|}|{|-|−|$|\\|,|.|%|^|=| x | + |(|)|1|23|456|0|1e5|e|/10| out of 10|1 to 10"
PIECES = st.sampled_from([*BARRED.split("|"), "number is ", "score ", "\n", " ", "٣", "²", "１", "\0", "\ud800"])
TEXTS = st.lists(PIECES | st.text(max_size=5), max_size=30).map("".join)


@given(TEXTS)
@settings(max_examples=500, deadline=None)
@example("answer is 1e5e5=")
@example("\\boxed{=1=}")
@example("#### -$1,000e5.5")
def test_any_text_is_read_without_an_error_and_what_is_found_is_canonical(text: str) -> None:
    for answer in (strict_answer(text), flexible_answer(text)):
        assert answer is None or normalize(answer) == answer
    value = parse_value(text, 1, 10)
    assert value is None or 1 <= value <= 10
    assert isinstance(same_number(text, text), bool)


@given(st.text(max_size=12) | st.from_regex(r"[-+−$]{0,2}[0-9,.]{1,8}[e%.]?[0-9]?", fullmatch=True))
@settings(max_examples=500, deadline=None)
def test_normalize_agrees_with_same_number_on_what_a_number_is(text: str) -> None:
    try:
        canonical = normalize(text)
    except ValueError:
        assert not same_number(text, text)
    else:
        assert same_number(text, canonical)
        assert normalize(canonical) == canonical


STYLES = [
    "{}",
    "{}.",
    "${}",
    "\\${}",
    "{}%",
    "**{}**",
    "({})",
    "\\({}\\)",
    "{}, I think",
    "{} dollars.",
    "{}\n",
    '"{}"',
]
NUMBERS = st.integers(-(10**30), 10**30).map(str) | st.decimals(-(10**15), 10**15, places=2).map(str)


@given(NUMBERS, st.booleans(), st.sampled_from("-−"), st.sampled_from(STYLES))
@settings(max_examples=500, deadline=None)
def test_a_number_in_a_sentence_is_found_in_every_style(number: str, commas: bool, minus: str, style: str) -> None:
    plain = format(Decimal(number), ",f" if commas else "f").replace("-", minus)
    written = style.format(plain)
    assert same_number(plain, number)
    for start in ("She pays ", "So 3 - 2 = ", "The answer is ", "answer: "):
        assert same_number(flexible_answer(start + written), number)
    assert same_number(flexible_answer(f"The answer is {written}, for 12 days."), number)
    assert same_number(strict_answer(f"2 + 2\n#### {plain}\n\nQuestion: 3"), number)
    assert same_number(strict_answer(f"2 + 2\n#### ${plain}."), number)


@given(
    st.integers(10, 100),
    st.sampled_from(["{}", "{}/10", "{} out of 10.", "**{}**", "Score: {}", "1 to 10: {}", "[{}]", "({})"]),
)
def test_a_value_on_the_scale_is_found_in_every_style(tenths: int, style: str) -> None:
    value = tenths / 10
    assert parse_value(style.format(f"{value:g}"), 1, 10) == value
