"""Searches at once are limited, clients take turns, and searches beyond the queue are refused."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx2 as httpx
import openai

VOTE = "vote: {search: 'self-consistency:samples=2'}"


def test_searches_under_way_are_limited_and_clients_take_turns(serve: Any, chat: Any, user: Any) -> None:
    decoder = chat("wait")
    server = serve(decoder, VOTE, max_searches=1)

    async def main() -> list[str]:
        ended: list[str] = []
        async with server.asynchronous(api_key="one") as one, server.asynchronous(api_key="two") as two:

            async def ask(client: openai.AsyncOpenAI, question: str) -> None:
                await client.chat.completions.create(model="chat:vote", messages=user(question))
                ended.append(question)

            asking = []
            for client, question in ((one, "a1"), (one, "a2"), (one, "a3"), (two, "b1")):
                asking.append(asyncio.create_task(ask(client, question)))
                while server.searches.gate.running + server.searches.gate.waiting < len(asking):
                    await asyncio.sleep(0.002)
            assert len({request.prompt for request in decoder.requests}) <= 1
            decoder.free.set()
            await asyncio.gather(*asking)
        return ended

    assert asyncio.run(main()) == ["a1", "b1", "a2", "a3"]


def test_a_search_that_computes_does_not_delay_other_clients(serve: Any, chat: Any, user: Any) -> None:
    decoder, began, end = chat("Paris"), threading.Event(), threading.Event()
    start = decoder.start

    def tokenize(*arguments: Any) -> Any:
        began.set()
        assert end.wait(60)
        return start(*arguments)

    decoder.start = tokenize
    server = serve(decoder, VOTE)
    with ThreadPoolExecutor() as pool:
        asking = pool.submit(server.post, model="chat:vote", messages=user("a?"))
        assert began.wait(60)
        try:
            assert httpx.get(f"{server.url}/health", timeout=20).status_code == 200
        finally:
            end.set()
        assert asking.result().json()["choices"][0]["message"]["content"] == "Paris"
