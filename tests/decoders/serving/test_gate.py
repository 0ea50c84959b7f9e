"""The gate is fair between clients, bounded, and loses no slot."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest

from tot.decoders.serving.errors import ServingError
from tot.decoders.serving.gate import Gate
from tot.decoders.serving.limits import Limits


class Visits:
    """Requests at a gate, which hold their slot until they are let go."""

    def __init__(self, slots: int, **limits: Any) -> None:
        self.gate = Gate(slots, Limits(**limits))
        self.admitted: list[str] = []
        self._held: dict[str, asyncio.Event] = {}

    async def arrive(self, name: str) -> asyncio.Task[str]:
        """Start request `name`, whose first letter is its client."""
        self._held[name] = asyncio.Event()

        async def visit() -> str:
            async with self.gate.passed(name[0]):
                self.admitted.append(name)
                await self._held[name].wait()
            return name

        task = asyncio.create_task(visit())
        await _settle()
        return task

    async def leave(self, name: str) -> None:
        self._held[name].set()
        await _settle()


async def _settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def test_a_free_slot_goes_to_the_client_with_the_fewest_running_requests() -> None:
    async def main() -> list[str]:
        visits = Visits(2)
        tasks = [await visits.arrive(name) for name in ("a1", "a2", "a3", "a4", "b1", "b2", "c1")]
        for name in ("a1", "a2", "b1", "c1", "a3", "b2", "a4"):
            await visits.leave(name)
        await asyncio.gather(*tasks)
        assert (visits.gate.running, visits.gate.waiting) == (0, 0)
        return visits.admitted

    assert asyncio.run(main()) == ["a1", "a2", "b1", "c1", "a3", "b2", "a4"]


def test_no_client_fills_the_queue_for_the_others() -> None:
    async def main() -> None:
        visits = Visits(1, queue=3)
        tasks = [await visits.arrive(f"a{i}") for i in range(4)]
        refused = await visits.arrive("a4")
        with pytest.raises(ServingError, match="the queue is full") as lost:
            await refused
        assert (lost.value.status, lost.value.retry_after) == (429, 1)
        tasks += [await visits.arrive(f"b{i}") for i in range(2)]
        refused = await visits.arrive("b2")
        with pytest.raises(ServingError, match="the queue is full"):
            await refused
        for name in ("a0", "b0", "a1", "b1", "a2", "a3"):
            await visits.leave(name)
        await asyncio.gather(*tasks)
        assert visits.admitted == ["a0", "b0", "a1", "b1", "a2", "a3"]

    asyncio.run(main())


def test_no_slot_is_lost_when_requests_are_cancelled_at_any_moment() -> None:
    async def main(seed: int) -> None:
        rng = random.Random(seed)
        visits = Visits(2, queue=20)
        tasks = [await visits.arrive(f"{rng.choice('abc')}{i}") for i in range(20)]
        for task in rng.sample(tasks, 20):
            if visits.admitted and rng.random() < 0.7:
                visits._held[visits.admitted[-1]].set()
            task.cancel()
            if rng.random() < 0.5:
                await asyncio.sleep(0)
        await asyncio.gather(*tasks, return_exceptions=True)
        assert (visits.gate.running, visits.gate.waiting) == (0, 0)
        later = await visits.arrive("d1")
        await visits.leave("d1")
        assert await later == "d1"

    for seed in range(30):
        asyncio.run(main(seed))
