"""Tuning: numbers of a program are changed one at a time, and only improvements stay."""

from __future__ import annotations

import asyncio
import random
import re

import pytest

from tot.tasks.tuning import tuned, varied

PROGRAM = "x = 0\n# tot: begin\ndef f(a):\n    é = 'é 3'; return a * 3 + 0x10 - 1.5 + 2j\n# tot: end\ny = 7\n"


def test_one_number_of_the_region_changes() -> None:
    rng = random.Random(0)
    results = {varied(PROGRAM, rng) or "" for _ in range(400)}
    form = r"x = 0\n# tot: begin\ndef f\(a\):\n    é = 'é 3'; return a \* (\S+) \+ (\S+) - (\S+) \+ 2j\n# tot: end\ny = 7\n"
    changed = [match.groups() if (match := re.fullmatch(form, result)) else () for result in results]
    assert all(len(one) == 3 for one in changed)
    assert all(sum(a != b for a, b in zip(one, ("3", "0x10", "1.5"), strict=True)) <= 1 for one in changed)
    assert {one[0] for one in changed} >= {"-3", "6", "8", "-2"}
    assert {one[1] for one in changed} >= {"32", "8", "17"}
    assert {one[2] for one in changed} >= {"3.0", "-1.5", "2.5"}


@pytest.mark.parametrize("program", ["x = 'no 3'\n", "let x = '''3\n", "(3\n", "  x\n 3\n", f"x = {'9' * 400}\n", "x = 3j\n", ""])
def test_programs_without_a_number_to_change(program: str) -> None:
    assert varied(program, random.Random(0)) is None
    assert climb(program, lambda _: 0.0) == (program, 1)


def climb(program: str, rate, patience: int = 10) -> tuple[str, int]:  # type: ignore[no-untyped-def]
    """Return the tuned program, and how often a program was rated."""
    count = 0

    async def value_of(program: str) -> float | None:
        nonlocal count
        count += 1
        return rate(program)  # type: ignore[no-any-return]

    return asyncio.run(tuned(program, value_of, patience)), count


def test_only_improvements_stay() -> None:
    assert climb("x = 1\n", lambda text: -abs(int(text[4:]) - 37))[0] == "x = 37\n"
    assert climb("x = 1\n", lambda text: 0.0) == climb("x = 1\n", lambda text: 0.0)
    assert climb("x = 1\n", lambda text: 0.0)[0] == "x = 1\n"
    assert climb("x = 1\n", lambda text: 0.0 if text == "x = 1\n" else None)[0] == "x = 1\n"


def test_tuning_ends_with_a_score_that_grows_without_limit() -> None:
    program, count = climb("x = 1.0\n", lambda text: float(text[4:]), patience=5)
    assert float(program[4:]) > 1
    assert count <= 51
