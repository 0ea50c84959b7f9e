"""BFS: unusable replies, spent budgets, a stopped search, and errors of decoders."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from tot import Budget, Solution
from tot.decoders.errors import RequestError


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


def test_a_node_budget_ends_growth_and_the_answer_is_asked_at_that_depth(
    letters: Any, scripted: Any, two_levels: Any, grow: Callable[..., Solution]
) -> None:
    decoder = scripted(two_levels)
    solution = grow(letters, decoder, budget=Budget(nodes=2))
    assert solution.stopped == "budget: nodes (2 of 2)"
    assert decoder.prompts == [["grow"], ["value a", "value b"], ["answer b"]]  # existing thoughts are still evaluated
    whole = scripted(two_levels)
    assert grow(letters, whole, budget=Budget(nodes=3)).stopped is None  # a started level is finished
    assert whole.prompts[-1] == ["answer b/d"]


def test_thoughts_cut_off_by_a_budget_are_dropped_but_are_not_parse_failures(
    letters: Any, scripted: Any, grow: Callable[..., Solution], values: Callable[..., dict[str, float | None]]
) -> None:
    cut = scripted.completion("half a tho", "budget")
    solution = grow(letters, scripted({"grow": [cut, "b"], "value b": "4"}), depth=2)
    assert values(solution.tree) == {"b": 4}
    assert solution.parse_failures == 0


def test_a_search_that_is_stopped_during_its_answer_ends_without_it(
    letters: Any, scripted: Any, grow: Callable[..., Solution], two_levels: Any
) -> None:
    class Slow(scripted):  # type: ignore[misc]
        cancelled = 0

        def start(self, requests: Any, meter: Any = None) -> list[asyncio.Task[Any]]:
            return [asyncio.ensure_future(self._one(request)) for request in requests]

        async def _one(self, request: Any) -> Any:
            try:
                await asyncio.sleep(60 * (request.purpose == "answer"))
            except asyncio.CancelledError:
                self.cancelled += 1
                raise
            return self.generate([request])

    decoder = Slow(two_levels)

    def watch(run: Any) -> None:
        if len(run.tree) == 7 and all(node.value is not None for node in run.tree if node.parent is not None):
            asyncio.get_running_loop().call_later(0.05, run.stop, "enough")

    solution = grow(letters, decoder, watch=watch)
    assert (solution.answer, solution.stopped, decoder.cancelled, len(solution.tree)) == ("b\nd", "enough", 1, 7)


def test_an_error_of_a_decoder_ends_the_search_and_names_the_decoder(
    letters: Any, scripted: Any, grow: Callable[..., Solution], two_levels: Any
) -> None:
    class Broken(scripted):  # type: ignore[misc]
        def generate(self, requests: Any) -> Any:
            if requests[0].purpose == "evaluate":
                raise ConnectionError("the server is gone")
            return super().generate(requests)

    with pytest.raises(RequestError, match="decoder Broken raised ConnectionError: the server is gone"):
        grow(letters, Broken(two_levels))
