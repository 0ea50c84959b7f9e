"""The canonical form of numbers, and their comparison."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tot.tasks.number_answers import normalize, same_number


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
        ("1/2", "1/2"),
        ("٣", "3"),
        ("1.5 million", "1500000"),
        ("20k", "20000"),
        (r"3 \times 10^{-2}", "0.03"),
        ("2/4", "1/2"),
        ("-6 / 3", "-2"),
        (r"\frac{3}{6}", "1/2"),
        (r"$-\dfrac{3}{6}$"[:-1], "-1/2"),
        ("1" + "0" * 5000, "1" + "0" * 5000),
        ("-0." + "1" * 5000, "-0." + "1" * 5000),
    ],
)
def test_normalize_returns_the_canonical_text(number: str, canonical: str) -> None:
    assert normalize(number) == canonical
    assert normalize(canonical) == canonical


@pytest.mark.parametrize(
    "number",
    ["", " ", "five", "1,00", "1,2", "1 2", "1.2.3", "10-3", "1/0", "1/2/3", "1/2.5", "nan", "inf", "2:30", "1_0"],
)
def test_normalize_rejects_texts_that_are_not_one_number(number: str) -> None:
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
        ("1/2", "0.5", True),
        ("1/3", "0.333", False),
        ("4/2", "2.0", True),
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


@given(st.text(max_size=12) | st.from_regex(r"[-+−$]{0,2}[0-9,.]{1,8}[e%.]?[0-9]?", fullmatch=True))
def test_normalize_accepts_exactly_the_numbers_that_same_number_accepts(text: str) -> None:
    try:
        canonical = normalize(text)
    except ValueError:
        assert not same_number(text, text)
    else:
        assert same_number(text, canonical)
        assert normalize(canonical) == canonical
