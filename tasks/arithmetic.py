"""Exact arithmetic with fractions, on expressions with + - * / and parentheses.

This module knows nothing of tasks or models. Expressions are parsed and never executed, in linear time, and no text
makes these functions raise, except for `calculator`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from fractions import Fraction
from itertools import combinations
from operator import add, mul, sub, truediv

OPERATORS = "+-*/"
MAX_LENGTH = 1000
"""Maximum length of an expression in characters."""

_TOKEN = re.compile(r"\s*(?:([0-9]++(?:\.[0-9]++)?|\.[0-9]++)|([-+*/()]))\s*")
_THOUSANDS = re.compile(r"(?<![0-9.,])[0-9]{1,3}(?:,[0-9]{3})++(?![0-9,])")
_PERCENT = re.compile(r"([0-9]++(?:\.[0-9]++)?)\s?%(?:\s*+(of)\b|(?=\s*+(?:[-+*/×)]|\Z)))")
_PLAIN = str.maketrans({"×": "*", "·": "*", "⋅": "*", "x": "*", "X": "*", "÷": "/", "−": "-", "–": "-"})
_OPERATIONS = {"+": add, "-": sub, "*": mul, "/": truediv}
_PRECEDENCE = {"+": 1, "-": 1, "*": 2, "/": 2, "sign": 3}


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
    `2(3)` is malformed.
    """
    tokens = _tokens(text)
    if tokens is None:
        return None
    values: list[Fraction] = []
    pending: list[str] = []  # operators and open parentheses: an explicit stack supports any nesting depth
    ready = False  # the previous token ended an operand
    for token in tokens:
        if not ready:
            if token in ("(", "-"):
                pending.append("(" if token == "(" else "sign")
            elif token in ")+*/":
                return None
            else:
                values.append(Fraction(token))
                ready = True
        elif token == ")":
            if not _reduce(values, pending, 1) or not pending:
                return None
            pending.pop()
        elif token in OPERATORS:
            if not _reduce(values, pending, _PRECEDENCE[token]):
                return None
            pending.append(token)
            ready = False
        else:
            return None
    if not ready or not _reduce(values, pending, 1) or pending:
        return None
    return values[0]


def numbers_in(expression: str) -> list[Fraction]:
    """Return the numbers in an expression, in order, without signs; empty if the text is not an expression."""
    return [Fraction(token) for token in _tokens(expression) or () if token not in "()+-*/"]


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


def _tokens(text: str) -> list[str] | None:
    if len(text) > MAX_LENGTH:
        return None
    text = text.translate(_PLAIN)
    tokens, position = [], 0
    while position < len(text):
        match = _TOKEN.match(text, position)
        if match is None:
            return None
        tokens.append(match[1] or match[2])
        position = match.end()
    return tokens


def _reduce(values: list[Fraction], pending: list[str], min_precedence: int) -> bool:
    # Apply the pending operators since the last open parenthesis with at least this precedence.
    while pending and pending[-1] != "(" and _PRECEDENCE[pending[-1]] >= min_precedence:
        operator = pending.pop()
        right = values.pop()
        if operator == "sign":
            values.append(-right)
            continue
        result = apply(operator, values.pop(), right)
        if result is None:
            return False
        values.append(result)
    return True
