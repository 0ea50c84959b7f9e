"""The engine: many streams awaited in one event loop, which may end before they do."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable

import pytest

from tot.decoders import LocalDecoder, Request, Sampling
from tot.decoders.engine.sequence import Handle

Serve = Callable[..., LocalDecoder]
STREAMS = 64


def endless(i: int = 0, tokens: int = 700) -> Request:
    return Request(prompt=f"{i} abc", sampling=Sampling(max_tokens=tokens, ignore_eos=True, temperature=1.0, seed=i))


def test_64_streams_are_awaited_at_once_without_extra_threads(serve: Serve) -> None:
    decoder = serve(kv_budget=6000)
    requests = [endless(i, 20) for i in range(STREAMS)]
    expected = [completion.text for completion in decoder.generate(requests)]
    threads = threading.active_count()
    order: list[int] = []

    async def text(i: int, handle: Handle) -> str:
        pieces = []
        async for _, piece in handle:
            order.append(i)
            pieces.append(piece)
            assert threading.active_count() <= threads
        return "".join(pieces)

    async def main() -> list[str]:
        handles = decoder.submit(requests, stream=True)
        return await asyncio.gather(*(text(i, handle) for i, handle in enumerate(handles)))

    assert asyncio.run(main()) == expected
    assert len(set(order[: len(order) // 2])) == STREAMS  # interleaved, not one after another


def test_cancelling_the_task_that_waits_for_pieces_cancels_the_request(decoder: LocalDecoder) -> None:
    (handle,) = decoder.submit([endless()], stream=True)
    received = asyncio.Event()

    async def take() -> None:
        async for _ in handle:
            received.set()

    async def main() -> None:
        taking = asyncio.create_task(take())
        await received.wait()
        taking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await taking

    asyncio.run(main())
    (completion,) = handle.result(30)
    assert completion.finish_reason == "cancelled"
    assert 0 < len(completion.tokens) < 700


def test_a_loop_that_ends_in_mid_stream_does_not_harm_the_engine(decoder: LocalDecoder) -> None:
    (handle,) = decoder.submit([endless(tokens=200)], stream=True)

    async def first() -> tuple[int, str]:
        pieces = handle.__aiter__()
        return await anext(pieces)  # the rest is never awaited

    _, piece = asyncio.run(first())
    (completion,) = handle.result(30)
    assert completion.text.startswith(piece)
    assert len(completion.tokens) == 200
    assert decoder.generate([endless(tokens=200)])[0].text == completion.text
