"""Many clients for many minutes: all kinds of requests, some clients hang up, read slowly or open half a request.

Every other request gets one complete answer, equal to its answer alone where a seed fixes it, and memory stays flat.
"""

from __future__ import annotations

import asyncio
import os
import random
import socket
import statistics
import time
from collections import Counter
from contextlib import suppress
from typing import Any

import httpx2 as httpx
import pytest

MINUTES = float(os.environ.get("SOAK_MINUTES", "20"))
CLIENTS = 8
QUESTIONS = ("What is a heron?", "Is seven a prime number?", "Name a river in France.", "What does a baker make?")
PATHS = {"text": "/v1/completions", "responses": "/v1/responses"}
KINDS = ("text", "chat", "exact", "vote", "tree", "responses")
MANNERS = ("whole", "stream", "slow", "hang up", "half")
SMALL = [(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)]
"""Socket options of a client whose connection buffers little."""


def body_of(kind: str, number: int, **more: Any) -> dict[str, Any]:
    """Return the body of a request. Equal numbers give equal bodies."""
    question = QUESTIONS[number % len(QUESTIONS)]
    body: dict[str, Any] = {"temperature": 1, "seed": number, **more}
    if kind == "text":
        return body | {"model": "smollm2-135m", "prompt": f"{question} It", "max_tokens": 12, "n": 2}
    messages = [{"role": "user", "content": question}]
    if kind == "responses":
        return body | {"model": "smollm2-135m:vote", "input": messages, "max_tokens": 10}
    suffix = "" if kind == "chat" else f":{kind}"
    return body | {"model": f"smollm2-135m{suffix}", "messages": messages, "max_tokens": 10}


class Load:
    """The clients of a server, and the replies that they got."""

    def __init__(self, server: Any, answer: Any) -> None:
        self._server = server
        self._answer = answer
        self._alone: dict[tuple[str, int], str] = {}
        """The answers of requests that ran alone, by kind and number."""
        self.ids: list[str] = []
        self.count: Counter[str] = Counter()
        self.memory: list[float] = []

    async def run(self, seconds: float) -> None:
        clients = [httpx.AsyncClient(timeout=300, headers={"authorization": f"Bearer {i}"}) for i in range(CLIENTS)]
        transport = httpx.AsyncHTTPTransport(socket_options=SMALL)
        slow = httpx.AsyncClient(timeout=300, transport=transport)
        for kind in ("text", "chat", "exact"):
            for number in range(8):
                await self._one(clients[0], kind, number, "whole")
        self._deadline = time.monotonic() + seconds
        tasks = [asyncio.create_task(self._client(i, clients[i], slow)) for i in range(CLIENTS)]
        measuring = asyncio.create_task(self._measure())
        try:
            await asyncio.gather(*tasks)
        finally:
            measuring.cancel()
            for client in (*clients, slow):
                await client.aclose()

    async def _measure(self) -> None:
        while True:
            self.memory.append(self._server.resident)
            await asyncio.sleep(1)

    async def _client(self, number: int, http: httpx.AsyncClient, slow: httpx.AsyncClient) -> None:
        chance = random.Random(number)
        while time.monotonic() < self._deadline:
            kind, manner = chance.choice(KINDS), chance.choices(MANNERS, (3, 3, 1, 1, 1))[0]
            seed = chance.randrange(8) if kind in ("text", "chat", "exact") else chance.getrandbits(40)
            if manner == "half":
                await self._half(chance)
            else:
                await self._one(slow if manner == "slow" else http, kind, seed, manner, chance.randint(1, 8))
            self.count[manner] += 1

    async def _one(self, http: httpx.AsyncClient, kind: str, number: int, manner: str, left: int = 0) -> None:
        """Send a request, and check its answer unless the client hangs up after `left` pieces."""
        url = self._server.url + PATHS.get(kind, "/v1/chat/completions")
        body, text = body_of(kind, number, stream=manner != "whole"), ""
        async with http.stream("POST", url, json=body) as reply:
            async for piece in reply.aiter_text():
                text += piece
                left -= 1
                if manner == "hang up" and left <= 0:
                    return
                if manner == "slow":
                    await asyncio.sleep(0.2)
        assert reply.status_code == 200, text
        name, answer = self._answer(text)
        self.ids.append(name)
        self.count[kind] += 1
        assert f'"seed":{number}' in text.replace('"seed": ', '"seed":')
        if kind in ("text", "chat", "exact"):
            assert answer == self._alone.setdefault((kind, number), answer)

    async def _half(self, chance: random.Random) -> None:
        """Open a request, send a part of it, and leave."""
        host, port = self._server.url.removeprefix("http://").split(":")
        head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        whole = head + b'Content-Length: 99\r\n\r\n{"model": "smollm2-135m", "prompt": '
        _, writer = await asyncio.open_connection(host, int(port))
        writer.write(whole[: chance.randrange(len(whole))])
        await asyncio.sleep(chance.uniform(0, 3))
        writer.close()
        with suppress(OSError):
            await writer.wait_closed()


@pytest.mark.soak
@pytest.mark.timeout(60 * MINUTES + 1800)
def test_under_load_no_answer_is_lost_or_doubled_and_memory_is_flat(
    serve: Any, smollm2: str, answer: Any, report: Any
) -> None:
    server = serve(smollm2, "--kv-budget", "1200")  # full before the second quarter
    load = Load(server, answer)
    asyncio.run(load.run(60 * MINUTES))
    server.check_idle()
    assert len(set(load.ids)) == len(load.ids)
    quarter = len(load.memory) // 4
    warm, end = (statistics.fmean(part) for part in (load.memory[quarter : 2 * quarter], load.memory[-quarter:]))
    report(f"{MINUTES:g} minutes, {len(load.ids)} answers checked, {dict(load.count)}")
    report(f"resident MiB: second quarter {warm:.1f}, last quarter {end:.1f} ({end / warm - 1:+.2%})")
    report(f"resident MiB over time: {[round(load.memory[i * (len(load.memory) - 1) // 20]) for i in range(21)]}")
    assert {*KINDS, *MANNERS} <= {*load.count}
    assert end < 1.03 * warm
