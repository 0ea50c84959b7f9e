"""Parsing of numeric answers from model replies."""

import pytest

from tot.tasks.number_answers import flexible_answer, strict_answer


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
        ("18:30", None),
        ("3:1", "1"),
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
def test_a_minus_is_a_sign_unless_it_can_be_an_operator_or_a_hyphen(text: str, answer: str) -> None:
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
def test_an_announced_equation_gives_its_result(text: str, answer: str) -> None:
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
def test_without_an_announcement_the_last_number_is_the_answer(text: str, answer: str) -> None:
    assert flexible_answer(text) == answer
