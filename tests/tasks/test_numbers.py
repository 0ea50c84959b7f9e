"""Numbers in arbitrary text, their canonical form and their comparison; see texts.jsonl."""

from __future__ import annotations

from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tot.tasks import GSM8K
from tot.tasks.number_answers import flexible_answer, normalize, same_number, strict_answer

TASK = GSM8K()
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
def test_a_number_in_a_sentence_is_found_in_every_style(number: str, commas: bool, minus: str, style: str) -> None:
    plain = format(Decimal(number), ",f" if commas else "f").replace("-", minus)
    written = style.format(plain)
    assert same_number(plain, number)
    for start in ("She pays ", "So 3 - 2 = ", "The answer is ", "answer: "):
        assert same_number(flexible_answer(start + written), number)
    assert same_number(flexible_answer(f"The answer is {written}, for 12 days."), number)
    assert same_number(strict_answer(f"2 + 2\n#### {plain}\n\nQuestion: 3"), number)
    assert same_number(strict_answer(f"2 + 2\n#### ${plain}."), number)


def test_adversarial_text_after_an_announced_number_is_not_its_equation() -> None:
    for piece in (" ", "a", "(", "a ", "^", "{1}", "%"):
        assert flexible_answer("the answer is 7" + piece * (1_000_000 // len(piece))) == "7"


@pytest.mark.parametrize(
    "number",
    ["", " ", "five", "1,00", "1,2", "1 2", "1.2.3", "10-3", "1/0", "1/2/3", "1/2.5", "nan", "inf", "2:30", "1_0"],
)
def test_normalize_rejects_texts_that_are_not_one_number(number: str) -> None:
    with pytest.raises(ValueError, match="is not one number"):
        normalize(number)
    assert not same_number(number, number)


@given(st.text(max_size=12) | st.from_regex(r"[-+−$]{0,2}[0-9,.]{1,8}[e%.]?[0-9]?", fullmatch=True))
def test_normalize_accepts_exactly_the_numbers_that_same_number_accepts(text: str) -> None:
    try:
        canonical = normalize(text)
    except ValueError:
        assert not same_number(text, text)
    else:
        assert same_number(text, canonical)
        assert normalize(canonical) == canonical


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
