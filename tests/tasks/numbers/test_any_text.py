"""Numbers in arbitrary text: adversarial inputs, and every style of writing."""

from decimal import Decimal

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tot.task.parsing import parse_value
from tot.tasks.number_answers import flexible_answer, normalize, same_number, strict_answer

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
def test_a_million_adversarial_characters_are_parsed_in_linear_time(piece: str) -> None:
    """Quadratic matching would take hours."""
    text = piece * (1_000_000 // len(piece))
    last = {"1,": "1", "5": text, "answer is 5 x ": "5", "5 apples + ": "5", "1 being ": "1"}
    assert flexible_answer(text) == last.get(piece)
    assert strict_answer(text) is None
    assert parse_value(text, 20, 30) is None


def test_adversarial_text_after_an_announced_number_is_not_its_equation() -> None:
    for piece in (" ", "a", "(", "a ", "^", "{1}", "%"):
        assert flexible_answer("the answer is 7" + piece * (1_000_000 // len(piece))) == "7"


# Pieces that the patterns look for (separated by bars), in any order, with any text between them.
BARRED = "#### |answer is |answer: |\\boxed{|}|{|-|−|$|\\|,|.|%|^|=| x | + |(|)|1|23|456|0|1e5|e|/10| out of 10|1 to 10"


PIECES = st.sampled_from([*BARRED.split("|"), "number is ", "score ", "\n", " ", "٣", "²", "１", "\0", "\ud800"])
TEXTS = st.lists(PIECES | st.text(max_size=5), max_size=30).map("".join)


@given(TEXTS)
@example("answer is 1e5e5=")
@example("\\boxed{=1=}")
@example("#### -$1,000e5.5")
def test_any_text_is_parsed_without_error_to_canonical_numbers(text: str) -> None:
    for answer in (strict_answer(text), flexible_answer(text)):
        assert answer is None or normalize(answer) == answer
    value = parse_value(text, 1, 10)
    assert value is None or 1 <= value <= 10
    assert isinstance(same_number(text, text), bool)


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
