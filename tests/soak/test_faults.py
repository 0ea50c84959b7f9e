"""A hundred searches at once and kill -9 in mid-search: each client gets an answer or an error."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

import httpx2 as httpx
import pytest

pytestmark = pytest.mark.soak
LONG = " ".join(f"The heron number {i} eats {i + 3} fish." for i in range(40))
"""Long enough for the prefix cache."""


def chat(model: str, **more: Any) -> dict[str, Any]:
    return {"model": f"smollm2-135m{model}", "messages": [{"role": "user", "content": LONG}], "seed": 1, **more}


async def received(http: httpx.AsyncClient, body: dict[str, Any]) -> tuple[int, str]:
    """Return the status and the text of a reply; status 0 if the connection breaks."""
    text = ""
    try:
        async with http.stream("POST", "/v1/chat/completions", json=body) as reply:
            async for piece in reply.aiter_text():
                text += piece
    except httpx.TransportError:
        return 0, text
    return reply.status_code, text


async def until(server: Any, **least: float) -> None:
    """Wait until metrics have reached these values."""
    await asyncio.to_thread(
        server.wait_for, lambda: all(server.metrics()[f"tot_{name}"] >= value for name, value in least.items())
    )


def test_of_a_hundred_searches_at_once_none_is_lost(serve: Any, smollm2: str, answer: Any, report: Any) -> None:
    server = serve(smollm2, "--queue", "40", "--kv-budget", "8000")
    bodies = [chat(":vote", max_tokens=4, stream=i % 2 == 0) | {"seed": i} for i in range(100)]
    refused, health = [], []

    async def one(http: httpx.AsyncClient, body: dict[str, Any]) -> str:
        while True:
            reply = await http.post("/v1/chat/completions", json=body)
            if reply.status_code == 200:
                return reply.text
            assert (reply.status_code, reply.json()["error"]["code"]) == (429, "queue_full")
            refused.append(body["seed"])
            await asyncio.sleep(float(reply.headers["retry-after"]))

    async def watch(http: httpx.AsyncClient) -> None:
        while True:
            began = time.monotonic()
            assert (await http.get("/health")).status_code == 200
            health.append(time.monotonic() - began)
            await asyncio.sleep(0.05)

    async def main() -> list[str]:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=server.url, timeout=900, limits=limits) as http:
            watching = asyncio.create_task(watch(http))
            texts = await asyncio.gather(*(one(http, body) for body in bodies))
            assert not watching.done()
            watching.cancel()
            return texts

    ids = {answer(text)[0] for text in asyncio.run(main())}
    assert len(ids) == 100
    assert refused
    assert len(health) > 10
    report(f"{len(set(refused))} of 100 refused at first; {len(health)} times /health, longest {max(health):.2f} s")
    server.check_idle()


def test_after_kill_9_clients_get_an_error_and_a_new_server_serves(serve: Any, smollm2: str, answer: Any) -> None:
    server = serve(smollm2, "--kv-budget", "12000")
    before = server.post(**chat("", max_tokens=8)).text
    server.wait_for(lambda: [*server.cache.glob("prefixes/*")])
    bodies = [
        chat(model, max_tokens=400, stream=stream) for model in ("", ":vote", ":tree") for stream in (True, False)
    ]
    bodies = [body | {"messages": [{"role": "user", "content": f"{i} {LONG}"}]} for i, body in enumerate(bodies)]

    async def main() -> list[tuple[int, str]]:
        async with httpx.AsyncClient(base_url=server.url, timeout=300) as http:
            asking = [asyncio.create_task(received(http, body)) for body in bodies]
            await until(server, requests_running=2, searches_running=4)
            server.process.kill()
            return await asyncio.gather(*asking)

    replies = asyncio.run(main())
    assert [status for status, _ in replies] == [0] * len(bodies)
    assert not any("[DONE]" in text for _, text in replies)
    server.process.wait()
    server.start()
    after = server.post(**chat("", max_tokens=8)).text
    assert answer(after)[1] == answer(before)[1]
    assert json.loads(after)["usage"]["prompt_tokens_details"]["cached_tokens"] > 0  # the files are whole
    server.check_idle()
