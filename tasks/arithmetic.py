"""Exact arithmetic on expressions with + - * / and parentheses, in fractions.

Knows nothing of tasks or models. Text is data: it is parsed, never executed, in time linear in the text, and no text
makes these functions raise.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from fractions import Fraction
from itertools import combinations

from tot.decoders.errors import TaskError

OPERATORS = "+-*/"
MAX_LENGTH = 1000
"""Characters of the longest expression that is read."""

_TOKEN = re.compile(r"\s*(?:([0-9]++(?:\.[0-9]++)?|\.[0-9]++)|([-+*/()]))\s*")
_PLAIN = str.maketrans({"×": "*", "·": "*", "⋅": "*", "x": "*", "X": "*", "÷": "/", "−": "-", "–": "-"})
_PRECEDENCE = {"+": 1, "-": 1, "*": 2, "/": 2, "sign": 3}


def calculator(expression: str) -> str:
    """Work out numbers with + - * / and parentheses.

    >>> calculator("3 * (4 + 1.5)")
    16.5
    """
    value = evaluate(expression)
    if value is None:
        raise ValueError(f"{expression[:100]!r} can't be worked out: write numbers with + - * / and parentheses")
    return str(value.numerator if value.denominator == 1 else round(float(value), 10))


def evaluate(text: str) -> Fraction | None:
    """The value of an expression, or None where it is malformed, longer than MAX_LENGTH or divides by zero.

    `×`, `·` and `x` multiply, `÷` divides, `−` subtracts; a minus may be a sign. Nothing is multiplied unsaid: `2(3)`
    is malformed.
    """
    tokens = _tokens(text)
    if tokens is None:
        return None
    values: list[Fraction] = []
    pending: list[str] = []  # operators and open parentheses: a stack of our own, so that no nesting is too deep
    ready = False  # an operand has just ended
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
    """The numbers written in an expression, in order, without signs; none where a character does not belong in one."""
    return [Fraction(token) for token in _tokens(expression) or () if token not in "()+-*/"]


def apply(operator: str, a: Fraction, b: Fraction) -> Fraction | None:
    """`a operator b`, or None where it divides by zero. Raises TaskError for an operator that is not one of + - * /."""
    match operator:
        case "+":
            return a + b
        case "-":
            return a - b
        case "*":
            return a * b
        case "/":
            return a / b if b else None
    raise TaskError(f"{operator!r} is not an operator: give one of {' '.join(OPERATORS)}")


def pairings(values: Sequence[Fraction]) -> Iterator[tuple[int, str, int, Fraction]]:
    """Each way to join two of `values`: (place of the left one, operator, place of the right one, result).

    Sums and products are given once for a pair, differences and quotients both ways round.
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
    tokens, place = [], 0
    while place < len(text):
        found = _TOKEN.match(text, place)
        if found is None:
            return None
        tokens.append(found[1] or found[2])
        place = found.end()
    return tokens


def _reduce(values: list[Fraction], pending: list[str], least: int) -> bool:
    # Applies the pending operators down to the last open parenthesis that bind at least as tightly as `least`.
    while pending and pending[-1] != "(" and _PRECEDENCE[pending[-1]] >= least:
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
