"""Exact arithmetic: values, adversarial text, and the solver on every puzzle of a real data set."""

from __future__ import annotations

import ast
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tot.tasks.arithmetic import apply, evaluate, numbers_in, pairings

MALFORMED = "|() | )(|1 +|* 2|+ 2|1 2|2(3)|(2)3|(1|1)|2 ** 3|2 // 3|1,000|1.|٣|8 / 3 = 2|__import__('os')|1e5|24\0"


@pytest.mark.parametrize(
    "text", ["(" * 10_000, "(" * 10_000 + "1" + ")" * 10_000, "-" * 10_000 + "1", "9" * 10_000, " " * 10_000_000]
)
def test_text_that_is_too_long_or_too_deep_has_no_value(text: str) -> None:
    assert evaluate(text) is None
    assert numbers_in(text) == []


@given(st.text(alphabet="0123456789.+-*/()x×÷− \n=a", max_size=40))
def test_no_text_raises_and_every_value_has_numbers(text: str) -> None:
    if evaluate(text) is not None:
        assert numbers_in(text)


def nested(part: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    return st.tuples(part, st.sampled_from("+-*"), part).map(lambda parts: f"({' '.join(parts)})")


@given(st.recursive(st.integers(0, 99).map(str), nested, max_leaves=20))
def test_values_match_python(text: str) -> None:
    assert evaluate(text) == python(ast.parse(text, mode="eval").body)


def python(node: Any) -> int:
    if isinstance(node, ast.Constant):
        return int(str(node.value))
    a, b = python(node.left), python(node.right)
    return {ast.Add: a + b, ast.Sub: a - b, ast.Mult: a * b}[type(node.op)]


def test_the_numbers_of_an_expression_are_the_written_ones() -> None:
    assert numbers_in("(13 - 9) * (10 - 4)") == [13, 9, 10, 4]
    assert numbers_in("-3 + 1.5 × 3") == [3, Fraction(3, 2), 3]
    assert numbers_in("1 3") == [1, 3]  # not 13
    assert numbers_in("13 apples") == []


def test_operators_are_exact_and_reject_division_by_zero() -> None:
    three, eight = Fraction(3), Fraction(8)
    assert [apply(operator, eight, three) for operator in "+-*/"] == [11, 5, 24, Fraction(8, 3)]
    assert apply("/", eight, Fraction(0)) is None


def test_two_numbers_pair_in_six_ways() -> None:
    results = [result for _, _, _, result in pairings([Fraction(3), Fraction(8)])]
    assert results == [11, -5, 5, 24, Fraction(3, 8), Fraction(8, 3)]
    assert len(list(pairings([Fraction(0), Fraction(8)]))) == 5  # 8 / 0 is invalid
    assert len(list(pairings([Fraction(1)] * 4))) == 36
