"""Streams of searches: thoughts as they end, then the answer. Searches end with their clients and the server."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx2 as httpx
import pytest

VOTE = "vote: {search: 'auto:samples=3,until=1,together=3'}"
"""Its samples arrive one by one."""


def test_thoughts_arrive_before_the_search_ends(serve: Any, chat: Any, user: Any) -> None:
    decoder = chat("Paris", "wait, Paris", "Lyon")
    server = serve(decoder, VOTE)
    with server.client() as client:
        stream = client.chat.completions.create(
            model="chat:vote", messages=user("Which?"), seed=4, stream=True, stream_options={"include_usage": True}
        )
        first, second = next(stream), next(stream)
        assert decoder.unfinished == 1
        thoughts = [chunk.choices[0].delta.reasoning_content for chunk in (first, second)]
        assert thoughts == ["[1] Paris\n\n", "[2] Lyon\n\n"]
        assert first.choices[0].delta.role == "assistant"
        decoder.free.set()
        third, answer, end, usage = list(stream)
    assert third.choices[0].delta.reasoning_content == "[3] wait, Paris\n\n"
    assert answer.choices[0].delta.content == "Paris"
    assert end.choices[0].finish_reason == "stop"
    assert end.tot["seed"] == 4
    assert end.tot["thoughts"] == 3
    assert usage.choices == []
    assert usage.usage.completion_tokens == 15
    assert len({chunk.id for chunk in (first, second, third, answer, end, usage)}) == 1


def test_a_stream_has_the_whole_reply(serve: Any, chat: Any, user: Any) -> None:
    options = {"model": "chat:tree", "messages": user("Which?"), "seed": 1}
    texts = ("One\n\n", "Two\n\n", "Three.", "Four.")
    with serve(chat(*texts)).client() as client:
        whole = client.chat.completions.create(**options)
    with serve(chat(*texts)).client() as client, client.chat.completions.stream(**options) as stream:
        streamed = stream.get_final_completion()
    assert whole.choices[0].message.content == streamed.choices[0].message.content == "One\n\nThree."
    assert streamed.choices[0].message.reasoning_content == whole.choices[0].message.reasoning_content
    assert whole.choices[0].message.reasoning_content.startswith("[1] One\n\n[2] Two\n\n[")


def test_a_level_is_sent_when_it_ends(serve: Any, chat: Any, user: Any) -> None:
    decoder = chat("One\n\n", "Two\n\n", "wait", "Four.")
    server = serve(decoder)
    with server.client() as client:
        stream = client.chat.completions.create(model="chat:tree", messages=user("Which?"), stream=True)
        thoughts = [next(stream).choices[0].delta.reasoning_content for _ in range(2)]
        assert thoughts == ["[1] One\n\n", "[2] Two\n\n"]
        server.wait_until(lambda: decoder.unfinished >= 1)
        decoder.free.set()
        list(stream)


# -- hang-up and shutdown --------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [True, False])
def test_a_hang_up_cancels_the_search(serve: Any, chat: Any, user: Any, stream: bool) -> None:
    decoder = chat("Paris", "wait", "wait")
    server = serve(decoder, VOTE)

    async def main() -> None:
        async with httpx.AsyncClient(base_url=server.url, timeout=60) as http:
            body = {"model": "chat:vote", "messages": user("a?"), "stream": stream}
            request = asyncio.create_task(http.post("/v1/chat/completions", json=body))
            while decoder.unfinished < 2 or len(decoder.requests) < 3:
                await asyncio.sleep(0.005)
            request.cancel()
            await asyncio.gather(request, return_exceptions=True)

    asyncio.run(main())
    server.wait_until(lambda: server.idle)
    assert decoder.cancelled == 2
    server.wait_until(lambda: server.metric("tot_disconnects_total") == 1)
    assert server.metric('tot_searches_total{model="chat:vote",outcome="cancelled"}') == 1


@pytest.mark.parametrize("stream", [True, False])
def test_at_shutdown_a_search_may_end(serve: Any, chat: Any, user: Any, stream: bool) -> None:
    decoder = chat("Paris", "wait, Paris", "Rome")
    server = serve(decoder, VOTE)

    async def main() -> Any:
        async with httpx.AsyncClient(base_url=server.url, timeout=60) as http:
            body = {"model": "chat:vote", "messages": user("a?"), "stream": stream}
            request = asyncio.create_task(http.post("/v1/chat/completions", json=body))
            while len(decoder.requests) < 3:
                await asyncio.sleep(0.005)
            server.server.should_exit = True
            while not server.searches.gate.closed:
                await asyncio.sleep(0.005)
            refused = await http.post("/v1/chat/completions", json=body)
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "stopping")
            decoder.free.set()
            return await request

    assert "Paris" in asyncio.run(main()).text


def test_at_shutdown_a_search_beyond_the_grace_time_is_cancelled(serve: Any, chat: Any, user: Any) -> None:
    decoder = chat("Paris", "wait", "wait")
    server = serve(decoder, VOTE, grace=0)

    async def main() -> tuple[Any, Any]:
        async with httpx.AsyncClient(base_url=server.url, timeout=60) as http:
            body = {"model": "chat:vote", "messages": user("a?")}
            requests = [
                asyncio.create_task(http.post("/v1/chat/completions", json={**body, "stream": stream}))
                for stream in (False, True)
            ]
            while len(decoder.requests) < 6:
                await asyncio.sleep(0.005)
            server.server.should_exit = True
            return await asyncio.gather(*requests)

    whole, streamed = asyncio.run(main())
    assert (whole.status_code, whole.json()["error"]["code"]) == (503, "stopping")
    assert "the server is stopping" in streamed.text
    assert decoder.unfinished == 0
    assert decoder.cancelled >= 3
