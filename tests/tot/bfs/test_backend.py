"""BFS: a stopped search, and errors of decoders."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from tot import Solution
from tot.decoders.errors import RequestError


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
