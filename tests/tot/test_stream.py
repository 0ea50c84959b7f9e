"""astream: the events of a search, and searches that end with their stream."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from typing import Any

import pytest

from tot import BFS, SearchFinished, SearchStarted, SearchStep, Value, astream, solve
from tot.decoders import OptionError

SEARCH: dict[str, Any] = {"search": BFS(thoughts=2, breadth=1, depth=3), "evaluator": Value()}


def test_a_stream_starts_shows_each_step_and_ends_with_the_solution(
    letters: Any, scripted: Any, two_levels: Any
) -> None:
    async def events() -> list[Any]:
        seen = []
        async for event in astream(letters, "q", decoder=scripted(two_levels), **SEARCH):
            seen.append((type(event), len(event.tree) - 1, event.usage.new_tokens))
        assert isinstance(event, SearchFinished)
        alone = solve(letters, "q", decoder=scripted(two_levels), **SEARCH)
        assert (event.solution.answer, event.solution.value, event.solution.usage.new_tokens) == (
            (alone.answer, alone.value, alone.usage.new_tokens)
        )
        return seen

    steps = [(SearchStep, 2, 10), (SearchStep, 2, 20), (SearchStep, 4, 30), (SearchStep, 4, 40)]
    assert asyncio.run(events()) == [(SearchStarted, 0, 0), *steps, (SearchFinished, 4, 45)]


def test_a_vote_has_a_leader_with_its_share(scripted: Any) -> None:
    class Turns(scripted):  # type: ignore[misc]
        def generate(self, requests: Any) -> Any:
            texts = iter(["so \\boxed{5}", "so \\boxed{6}", "so \\boxed{5}"])
            return [self.completion(next(texts)) for one in requests for _ in range(one.sampling.n)]

    async def leaders() -> list[Any]:
        how: dict[str, Any] = {"search": "self-consistency:samples=3,aggregate=majority", "prompts": "chat"}
        return [event.leader async for event in astream("gsm8k", "How much?", decoder=Turns({}), **how)]

    first, *_, last = asyncio.run(leaders())
    assert first is None
    assert (last.answer, last.certainty, last.share) == ("5", None, pytest.approx(2 / 3))


@pytest.mark.parametrize("by", ["close", "cancel"])
def test_closing_or_cancelling_a_stream_ends_its_search(letters: Any, scripted: Any, two_levels: Any, by: str) -> None:
    decoder = scripted(two_levels)

    async def read() -> None:
        async with aclosing(astream(letters, "q", decoder=decoder, **SEARCH)) as events:
            async for event in events:
                if isinstance(event, SearchStep):
                    if by == "close":
                        return
                    task = asyncio.current_task()
                    assert task is not None
                    task.cancel()

    async def whole() -> None:
        await asyncio.gather(asyncio.create_task(read()), return_exceptions=True)
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(whole())
    assert len(decoder.requests) < 7


def test_the_error_of_a_search_is_raised_in_its_stream(letters: Any) -> None:
    async def read() -> None:
        async for _ in astream(letters, "", decoder="sed"):
            pass

    with pytest.raises(OptionError, match="unknown decoder 'sed'"):
        asyncio.run(read())
