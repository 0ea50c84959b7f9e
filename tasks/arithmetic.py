"""Exact arithmetic with fractions, on expressions with + - * / and parentheses.

This module knows nothing of tasks or models. Expressions are parsed and never executed, and no text makes these
functions raise, except for `calculator`.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence
from fractions import Fraction
from itertools import combinations
from operator import add, mul, sub, truediv

OPERATORS = "+-*/"
MAX_LENGTH = 1000
"""Maximum length of an expression in characters."""

_NUMBER = re.compile(r"[0-9]++(?:\.[0-9]++)?|\.[0-9]++")
_EXPRESSION = re.compile(rf"(?:\s*+(?:{_NUMBER.pattern}|[-+*/()]))*+\s*+")
_THOUSANDS = re.compile(r"(?<![0-9.,])[0-9]{1,3}(?:,[0-9]{3})++(?![0-9,])")
_PERCENT = re.compile(r"([0-9]++(?:\.[0-9]++)?)\s?%(?:\s*+(of)\b|(?=\s*+(?:[-+*/×)]|\Z)))")
_PLAIN = str.maketrans({"×": "*", "·": "*", "⋅": "*", "x": "*", "X": "*", "÷": "/", "−": "-", "–": "-"})
_OPERATIONS = {"+": add, "-": sub, "*": mul, "/": truediv}
_NODES: dict[type[ast.operator], str] = {ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.Div: "/"}


def calculator(expression: str) -> str:
    """Work out numbers with + - * / and parentheses.

    >>> calculator("3 * (4 + 1.5)")
    16.5
    """
    plain = _THOUSANDS.sub(lambda number: number[0].replace(",", ""), expression)
    value = evaluate(_PERCENT.sub(lambda match: f"({match[1]} / 100){'*' if match[2] else ''}", plain))
    if value is None:
        raise ValueError(f"{expression[:100]!r} can't be worked out: write numbers with + - * / and parentheses")
    if value.denominator == 1:
        return str(value.numerator)
    if abs(value) < 0.001:
        return f"{float(value):.11g}"
    digits = f"{abs(round(value * 10**10)):011}"
    return f"{'-' if value < 0 else ''}{digits[:-10]}.{digits[-10:]}".rstrip("0").rstrip(".")


def evaluate(text: str) -> Fraction | None:
    """Return the value of an expression, or None if it is malformed, longer than MAX_LENGTH or divides by zero.

    `×`, `·` and `x` multiply, `÷` divides, `−` subtracts; a minus may be a sign. There is no implicit multiplication:
    `2(3)` is malformed. So are more than a hundred nested parentheses.
    """
    exact = _NUMBER.sub(lambda number: f"({Fraction(number[0])})", " ".join(_plain(text).split()))
    try:
        return _value(ast.parse(exact, mode="eval").body)
    except (SyntaxError, ValueError, ZeroDivisionError, RecursionError, MemoryError):
        return None


def _value(node: ast.expr) -> Fraction:
    match node:
        case ast.Constant(value=int(number)):
            return Fraction(number)
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_value(operand)
        case ast.BinOp(left=left, op=operator, right=right) if type(operator) in _NODES:
            result: Fraction = _OPERATIONS[_NODES[type(operator)]](_value(left), _value(right))
            return result
    raise ValueError("not arithmetic")


def numbers_in(expression: str) -> list[Fraction]:
    """Return the numbers in an expression, in order, without signs; empty if the text is not an expression."""
    return [Fraction(number) for number in _NUMBER.findall(_plain(expression))]


def apply(operator: str, a: Fraction, b: Fraction) -> Fraction | None:
    """Return `a operator b` for one of + - * /, or None for a division by zero."""
    return None if operator == "/" and not b else _OPERATIONS[operator](a, b)


def pairings(values: Sequence[Fraction]) -> Iterator[tuple[int, str, int, Fraction]]:
    """Yield each combination of two values: (index of the left one, operator, index of the right one, result).

    Sums and products come once per pair, differences and quotients in both orders.
    """
    for first, second in combinations(range(len(values)), 2):
        for operator in OPERATORS:
            for left, right in ((first, second), (second, first))[: 2 if operator in "-/" else 1]:
                result = apply(operator, values[left], values[right])
                if result is not None:
                    yield left, operator, right, result


def _plain(text: str) -> str:
    """Return an expression with Python's operators; "" for other text."""
    plain = text.translate(_PLAIN) if len(text) <= MAX_LENGTH else ""
    return plain if _EXPRESSION.fullmatch(plain) else ""
