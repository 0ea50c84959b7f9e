"""Exact arithmetic on expressions with + - * / and parentheses, in fractions; and whether numbers can reach a target.

Knows nothing of tasks or models. Text is data: it is parsed, never executed, and no text makes these functions raise.
All take time linear in the text, except `solvable`, which searches.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from decimal import Decimal
from fractions import Fraction
from functools import lru_cache
from itertools import combinations

from tot.decoders.errors import TaskError

OPERATORS = "+-*/"
MAX_LENGTH = 1000
"""Characters of the longest expression that is read."""
MAX_NUMBERS = 6
"""Numbers that `solvable` takes: one more costs it about a hundred times as long."""

_TOKEN = re.compile(r"\s*(?:([0-9]++(?:\.[0-9]++)?|\.[0-9]++)|([-+*/()]))\s*")
_PLAIN = str.maketrans({"×": "*", "·": "*", "⋅": "*", "x": "*", "X": "*", "÷": "/", "−": "-", "–": "-"})
_PRECEDENCE = {"+": 1, "-": 1, "*": 2, "/": 2, "sign": 3}


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


def solvable(numbers: Sequence[Fraction], target: int = 24) -> str | None:
    """An expression that uses each of `numbers` exactly once and equals `target`; None where there is none.

    Tries everything, remembering which sorted numbers lead nowhere. Raises TaskError for no numbers or more than
    MAX_NUMBERS.
    """
    if not 1 <= len(numbers) <= MAX_NUMBERS:
        raise TaskError(f"there are {len(numbers)} numbers to reach {target} with: give 1 to {MAX_NUMBERS}")
    pool = sorted((number, _written(number)) for number in numbers)
    while len(pool) > 1:
        step = _first_step(tuple(value for value, _ in pool), Fraction(target))
        if step is None:
            return None
        left, operator, right, result = step
        joined = (result, f"({pool[left][1]} {operator} {pool[right][1]})")
        pool = sorted([*(entry for place, entry in enumerate(pool) if place not in (left, right)), joined])
    return pool[0][1].removeprefix("(").removesuffix(")") if pool[0][0] == target else None


@lru_cache(maxsize=200_000)
def _first_step(values: tuple[Fraction, ...], target: Fraction) -> tuple[int, str, int, Fraction] | None:
    # The first pairing from which the sorted `values` reach the target; at most MAX_NUMBERS deep.
    for step in pairings(values):
        left, _, right, result = step
        rest = sorted([*(value for place, value in enumerate(values) if place not in (left, right)), result])
        if rest == [target] or (len(rest) > 1 and _first_step(tuple(rest), target)):
            return step
    return None


def _written(number: Fraction) -> str:
    decimal = format(Decimal(number.numerator) / Decimal(number.denominator), "f")
    return decimal if Fraction(decimal) == number else f"({number})"  # thirds have no decimal


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
