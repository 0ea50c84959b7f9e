"""Generated questions of `code`: functions of a list of numbers, with three examples and thirty hidden tests.

`tot instances benchmarks/list_functions.py:ListFunctions` writes them to a file of questions for `code`.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from tot.tasks.code import Code

_NUMBERS: dict[str, Callable[[int], bool]] = {
    "even": lambda x: x % 2 == 0,
    "odd": lambda x: x % 2 == 1,
    "positive": lambda x: x > 0,
    "negative": lambda x: x < 0,
}
_FUNCTIONS: dict[str, tuple[str, Callable[[list[int], list[int]], Any]]] = {
    "count": ("how many {} numbers are in the list", lambda found, numbers: len(found)),
    "sum": ("the sum of the {} numbers in the list", lambda found, numbers: sum(found)),
    "list": ("a list of the {} numbers in the list", lambda found, numbers: found),
    "sort": ("the {} numbers in the list, sorted from small to large", lambda found, numbers: sorted(found)),
    "square": ("a list of the squares of the {} numbers in the list", lambda found, numbers: [x * x for x in found]),
    "sum_squares": (
        "the sum of the squares of the {} numbers in the list",
        lambda found, numbers: sum(x * x for x in found),
    ),
    "largest": (
        "the largest {} number in the list, or None if it has none",
        lambda found, numbers: max(found, default=None),
    ),
    "first": (
        "the first {} number in the list, or None if it has none",
        lambda found, numbers: next(iter(found), None),
    ),
    "without": (
        "the list without its {} numbers",
        lambda found, numbers: [x for x in numbers if x not in found],
    ),
    "are_all": (
        "True if all numbers in the list are {}, otherwise False",
        lambda found, numbers: len(found) == len(numbers),
    ),
}
"""Each function's description, and its result for the chosen numbers of a list and for the list."""
_EXAMPLES, _TESTS = 3, 30


def list_function(seed: int) -> dict[str, str]:
    """Return one of 40 questions, and its hidden tests as the answer."""
    number = random.Random(seed).randrange(len(_NUMBERS) * len(_FUNCTIONS))
    (kind, chosen), (verb, (text, compute)) = (
        list(_NUMBERS.items())[number % len(_NUMBERS)],
        list(_FUNCTIONS.items())[number // len(_NUMBERS)],
    )
    name, rng, calls = f"{verb}_{kind}", random.Random(number), []
    for _ in range(_EXAMPLES + _TESTS):
        numbers = [rng.randint(-9, 9) for _ in range(rng.randint(2, 5))]
        calls.append(f"{name}({numbers}) == {compute([x for x in numbers if chosen(x)], numbers)!r}")
    question = f"Write a Python function {name}(numbers) that returns {text.format(kind)}."
    tests = "\n".join(f"assert {call}" for call in calls[_EXAMPLES:])
    return {
        "question": "\n".join([question, "", *calls[:_EXAMPLES]]),
        "answer": f"from candidate import {name}\n{tests}",
    }


class ListFunctions(Code):
    """Programs for generated questions."""

    def instance(self, seed: int) -> dict[str, Any]:
        """Generate a question about a function of a list, with its hidden tests."""
        return list_function(seed)
