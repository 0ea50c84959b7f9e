"""BFS: unusable and repeated replies."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tot import Solution


def test_without_any_parsed_thought_the_answer_is_asked_at_the_root(
    letters: Any, scripted: Any, grow: Callable[..., Solution]
) -> None:
    decoder = scripted({"grow": ["", ""], "answer": "guess"})
    solution = grow(letters, decoder)
    assert decoder.prompts == [["grow"], ["answer"]]
    assert (solution.answer, solution.value, len(solution.tree)) == ("guess", None, 1)


@pytest.mark.parametrize("reply", ["", "no idea", "eleven", "0", "11 of 12"])
def test_an_unparsed_value_is_the_default_and_is_counted(
    letters: Any,
    scripted: Any,
    reply: str,
    grow: Callable[..., Solution],
    two_levels: Any,
    values: Callable[..., dict[str, float | None]],
) -> None:
    careful = type("Careful", (letters,), {"scale": (0.5, 10)})
    decoder = scripted(two_levels | {"value a": reply, "value b/d": reply})
    solution = grow(careful, decoder)
    assert values(solution.tree) == {"a": 0.5, "b": 7, "b/c": 2, "b/d": 0.5, "a/e": 9, "a/f": 5}
    assert solution.parse_failures == 2
    assert [node.parse_failures for node in solution.tree] == [0, 1, 0, 0, 1, 0, 0]
    assert (solution.answer, solution.stopped) == ("answer a/e", None)
