"""Tuning of the numbers in a program: hill climbing by one number at a time, without a model.

A language model may have the right idea, such as a threshold, and a poor guess of its value. LLM-SR (Shojaee et al.,
2024) fits the constants of a formula for the same reason.
"""

from __future__ import annotations

import ast
import random
from collections.abc import Awaitable, Callable
from io import StringIO
from tokenize import NUMBER, TokenError, generate_tokens

from tot.tasks.edits import region_of

_FACTORS = (-1.0, 0.5, 0.7, 0.9, 1.1, 1.4, 2.0)
_STEPS = (-5, -2, -1, 1, 2, 5)
_MOST = 1e300
"""Numbers that are changed are smaller, so that results are finite."""


async def tuned(program: str, value_of: Callable[[str], Awaitable[float | None]], patience: int) -> str:
    """Return the best program found by changing numbers, until `patience` changes in a row are no improvement.

    `value_of` rates a program; None means that it fails. The changes depend only on the program, and are at most ten
    times `patience`.
    """
    rng = random.Random(program)
    best, failures = await value_of(program), 0
    for _ in range(10 * patience):
        if failures == patience or (other := varied(program, rng)) is None:
            break
        value = None if other == program else await value_of(other)
        if value is not None and (best is None or value > best):
            program, best, failures = other, value, 0
        else:
            failures += 1
    return program


def varied(program: str, rng: random.Random) -> str | None:
    """Return a program with one number of its region changed; None if there is no number."""
    before, region, _ = region_of(program)
    first = before.count("\n") + 1
    rows = range(first, first + region.count("\n") + 1)
    try:
        tokens = [token for token in generate_tokens(StringIO(program).readline) if token.type == NUMBER]
        numbers = [(token, ast.literal_eval(token.string)) for token in tokens if token.start[0] in rows]
    except (SyntaxError, TokenError):  # not Python
        return None
    numbers = [(token, value) for token, value in numbers if not isinstance(value, complex) and value < _MOST]
    if not numbers:
        return None
    token, value = rng.choice(numbers)
    changed = value * rng.choice(_FACTORS) if rng.random() < 0.5 else value + rng.choice(_STEPS)
    lines = program.split("\n")
    (row, start), (_, end) = token.start, token.end
    line = lines[row - 1]
    lines[row - 1] = f"{line[:start]}{round(changed) if isinstance(value, int) else changed}{line[end:]}"
    return "\n".join(lines)
