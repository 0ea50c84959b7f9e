"""BFS: decoders by purpose, hooks, and errors."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from tot import BFS, Sample, Solution, Value
from tot.decoders.budget import Meter
from tot.decoders.errors import RequestError
from tot.llm.backend import Backend
from tot.search.session import SearchSession


def test_requests_go_to_the_decoder_of_their_purpose(letters: Any, scripted: Any, two_levels: Any) -> None:
    grower, judge, speaker = scripted(two_levels), scripted(two_levels), scripted(two_levels)
    backend = Backend({"generate": grower, "evaluate": judge, "answer": speaker}, Meter())
    session = SearchSession(letters(), "q", backend, BFS(thoughts=2, breadth=2, depth=3), Sample(), Value())

    async def run() -> str | None:
        await session.run()
        return await session.answer()

    assert asyncio.run(run()) == "the end"
    for decoder, purpose, count in ((grower, "generate", 3), (judge, "evaluate", 6), (speaker, "answer", 1)):
        assert [request.purpose for request in decoder.requests] == [purpose] * count
    assert session.meter.usage.new_tokens == session.meter.new_tokens == 65


def test_a_search_that_is_stopped_during_its_answer_ends_without_it(
    letters: Any, scripted: Any, two_levels: Any
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
    session = SearchSession(
        letters(),
        "q",
        Backend(dict.fromkeys(("generate", "evaluate", "answer"), decoder), Meter()),
        BFS(thoughts=2, breadth=2, depth=3),
        Sample(),
        Value(),
    )

    async def run() -> str | None:
        await session.run()
        asyncio.get_running_loop().call_later(0.05, session.stop, "enough")
        return await session.answer()

    assert asyncio.run(run()) is None
    assert (session.stopped, decoder.cancelled, len(session.tree)) == ("enough", 1, 7)


def test_a_hook_sees_the_tree_grow(letters: Any, scripted: Any, grow: Callable[..., Solution], two_levels: Any) -> None:
    sizes: list[int] = []
    grow(letters, scripted(two_levels), watch=lambda session: sizes.append(len(session.tree)))
    assert sizes == [1, 3, 3, 7, 7]


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
