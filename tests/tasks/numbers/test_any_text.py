"""Numbers in arbitrary text: adversarial inputs, and every style of writing."""

from decimal import Decimal

from hypothesis import given
from hypothesis import strategies as st

from tot.tasks.number_answers import flexible_answer, same_number, strict_answer


def test_adversarial_text_after_an_announced_number_is_not_its_equation() -> None:
    for piece in (" ", "a", "(", "a ", "^", "{1}", "%"):
        assert flexible_answer("the answer is 7" + piece * (1_000_000 // len(piece))) == "7"


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
