"""Numbers in LaTeX, in other languages' notation and as mixed fractions; Markdown headings; truncated texts."""

from fractions import Fraction

import pytest

from tot.tasks import GSM8K
from tot.tasks.number_answers import flexible_answer

TASK = GSM8K()


@pytest.mark.parametrize(
    ("reply", "value"),
    [
        (r"so \boxed{\frac12}", "1/2"),
        (r"so \boxed{\dfrac34 \text{ cup}}", "3/4"),
        (r"so \boxed{\frac1{20}}", "1/20"),
        (r"so \boxed{\frac{1}2}", "1/2"),
        (r"so \boxed{\frac{-1}{2}}", "-1/2"),
        (r"so \boxed{-\frac{3}{4}}", "-3/4"),
        (r"so \boxed{\frac{1.5}{2}}", "3/4"),
        (r"so \boxed{\frac{1,000}{3}}", "1000/3"),
        (r"so \boxed{\frac{3}{4}\text{ cup}}", "3/4"),
        (r"so \boxed{2\frac{1}{2}}", "5/2"),
        (r"so \boxed{-1\frac{1}{2}}", "-3/2"),
        ("The answer is 2 1/2 hours.", "5/2"),
        ("The answer is 1 and 1/2 hours.", "3/2"),
        ("#### 3 3/4", "15/4"),
        ("The answer is ½ cup.", "1/2"),
        ("The answer is 2½ hours.", "5/2"),
        ("The answer is 1 ¾ cups.", "7/4"),
    ],
)
def test_fractions_and_mixed_numbers_are_parsed_as_one_number(reply: str, value: str) -> None:
    answer = TASK.parse_answer(reply)
    assert Fraction(answer or 0) == Fraction(value)


@pytest.mark.parametrize(
    ("reply", "answer"),
    [
        ("The answer is １８.", "18"),
        ("The answer is －１，２３４．５.", "-1234.5"),
        ("The answer is ১৮.", "18"),
        ("The answer is ٣٫٥", "3.5"),
        ("The answer is minus five.", "-5"),
        ("The answer is negative 5", "-5"),
        ("10 minus 5", "5"),
        ("The answer is five times two = 10", "10"),
        ("Answer: Two boxes have 24 pens, so 12 in each", "12"),
        ("The answer is two and a half hours.", "5/2"),
        (r"The answer is 3 \times 10^5", "300000"),
        ("The answer is 3 × 10⁶.", "3000000"),
        ("It is 36 cm²", "36"),
        (r"\boxed{10^6}", "1000000"),
        (r"\boxed{\boxed{5}} for 3", "5"),
        (r"\fbox{7} for 3", "7"),
        (r"\boxed{\text{five}}", "5"),
        (r"\boxed{18 \text{ million}}", "18000000"),
        ("The answer is 1.5 million", "1500000"),
        ("The answer is $20k", "20000"),
        ("The answer is three dozen", "36"),
        ("The answer is USD 18 of 20", "18"),
        ("The answer is Rs. 500 of 600", "500"),
        ("Answer: ¥500 of 600", "500"),
        ("The answer is a total of 18 out of 20", "18"),
        ("The answer is that she has 18 of 20", "18"),
        ("The final answer (in dollars) is 18, not 20", "18"),
        ("<answer>18</answer> I am 95% confident.", "18"),
        ("So she has 18. Confidence: 95%", "18"),
        ("So she has 18 (confidence 9/10)", "18"),
        ("The answer is 2:30 pm", None),
        ("From 10:30 to 12:30 are 2 hours, 10:30 included", "2"),
    ],
)
def test_numbers_in_words_in_other_scripts_and_with_scales(reply: str, answer: str | None) -> None:
    assert TASK.parse_answer(reply) == answer


@pytest.mark.parametrize(
    "number",
    [
        "12{,}500",
        r"12,\!500",
        r"12\,500",
        r"12\ 500",
        "12~500",
        "12\u202f500",
        "12\u00a0500",
        "12'500",
        "12’500",
        "12 500",
    ],
)
def test_other_thousands_separators_are_accepted(number: str) -> None:
    assert TASK.parse_answer(f"The answer is {number} dollars.") == "12500"
    assert TASK.parse_answer(rf"so \boxed{{{number}}}") == "12500"


def test_spaces_group_thousands_only_in_an_announced_number() -> None:
    assert TASK.parse_answer("She fills 3 200 ml cups and 5 250 ml cups") == "250"
    assert TASK.parse_answer("The answer is 5 25 times") == "5"


@pytest.mark.parametrize(
    ("reply", "answer"),
    [
        ("#### 1. The pens\n3 × 4 = 12\n\n#### 2. Together\n12 + 10 is \\boxed{22}.", "22"),
        ("#### 1) The pens\n3 × 4 = 12\n\nThe answer is 12.", "12"),
        ("#### 24 hours in a day\nShe sleeps 8, so 24 − 8 = 16.\n\n**Answer: 16**", "16"),
        ("#### **1. The pens**\n3 × 4 = 12\n\nSo \\boxed{12}.", "12"),
        ("#### Step 1\n3 × 4 = 12\n#### Step 2\n12 + 1 = 13", "13"),
        ("##### 3) Together\n7 pens", "7"),
        ("#### $12 + $6 = $18", "18"),
        ("#### 3 × 4 = 12 pens", "12"),
        ("#### 18 dollars for 3 days", "18"),
        ("#### **18**", "18"),
    ],
)
def test_a_heading_is_not_an_answer_marker(reply: str, answer: str) -> None:
    assert TASK.parse_answer(reply) == answer


@pytest.mark.parametrize("heading", ["#### 1. The pens\n", "#### 2 pads\n", "##### 3) Together\n", "### 4\n"])
def test_a_heading_does_not_end_a_message(heading: str) -> None:
    assert not TASK.is_answered(heading)
    assert TASK.is_answered("#### 18\n")
    assert TASK.is_answered("#### $12 + $6 = $18\n")


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("She has 3 pens and buys 12", None),
        ("Step 1. She has 3 pens.\nStep 2", None),
        ("Answer: 2", None),  # the number may continue: 25
        ("The answer is 2 x 9 =", None),
        ("#### 12", None),
        ("The answer is 25. So she", "25"),
        ("Answer: 25\nThat is", "25"),
        (r"so \boxed{25}", "25"),
        ("#### 25\nQuestion: Tom", "25"),
    ],
)
def test_only_an_announced_answer_counts_in_a_truncated_text(text: str, answer: str | None) -> None:
    assert TASK.parse_truncated(text) == answer


@pytest.mark.parametrize(("one", "other"), [("1/2", "2"), ("-1/2", "2"), ("10/4", "4"), ("2 1/2", "1/2")])
def test_a_fraction_and_its_denominator_are_different_votes(one: str, other: str) -> None:
    assert TASK.canonical(one) != TASK.canonical(other)


@pytest.mark.parametrize(("one", "other"), [("1/2", "0.5"), ("5/2", "2 1/2"), ("12 500", "12,500"), ("$3.10", "3.1")])
def test_equal_numbers_are_the_same_vote(one: str, other: str) -> None:
    assert TASK.canonical(one) == TASK.canonical(other)


@pytest.mark.parametrize("reference", [18, 18.0, "18", "6 + 12 = 18\n#### 18"])
def test_a_reference_may_be_a_number_or_a_solution(reference: object) -> None:
    assert TASK.score("18", reference) == 1.0
    assert TASK.score("17", reference) == 0.0


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("The answer is 2^{10}", "1024"),
        ("The answer is $2^{10}$.", "1024"),
        ("It is 2**10.", "1024"),
        ("The answer is 2¹⁰", "1024"),
        ("The answer is 3 x 2^4", "48"),
        ("The answer is 2^{x}", None),
        ("The answer is 2.5^x", None),
        ("The answer is 1,234^x", None),
        ("So it is 2^{100}.", None),
        ("The answer is 2^{-1}", None),
        ("5 cm^-2", "5"),
        ("36 cm^2", "36"),
    ],
)
def test_a_power_is_computed_or_not_a_number(text: str, number: str | None) -> None:
    assert flexible_answer(text) == number
