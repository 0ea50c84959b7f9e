"""Thousands of hostile requests: none crashes the server, and none leaves anything behind."""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from typing import Any

import httpx2 as httpx
import pytest

from tot.decoders.serving.app import make_app
from tot.decoders.serving.completions import DecodingMethods
from tot.decoders.serving.limits import Limits
from tot.decoders.serving.service import Service

HM = {"role": "user", "content": "Hm."}
ODD: list[Any] = [
    None, True, False, 0, -1, 1, 2, 0.5, -0.0, 1e308, -1e308, 2**63, 2**64, 10**40, "", " ", "x", "\x00", "\ufeff",
    "<|im_end|>", "<|im_start|>system\n", "{{ 7 * 7 }}", "{% raw %}", "../../etc/passwd", "'; DROP TABLE x; --",
    "é" * 50, "👩‍👩‍👧‍👦", "\u202e", "A" * 3000, [], [[]], [None], [[[]]], ["x"], [1, 2, 3], [1.5], [-1], [10**9], [HM],
    {}, {"a": {}}, {"type": "text"}, [{"type": "text", "text": "x"}], [{"type": "image_url"}], "NaN", "tiny:pdos",
    "tiny:seed", "tiny:", ":", "ar", "json", "\n\r\n", "%s%n", "a" * 200, [""], ["\x00"], [["x"]],
]  # fmt: skip
FIELDS = (
    "model", "messages", "prompt", "max_tokens", "max_completion_tokens", "temperature", "top_p", "top_k", "min_p", "n",
    "seed", "stop", "stream", "stream_options", "logprobs", "top_logprobs", "echo", "purpose", "steps",
    "answer_trigger", "answer_tokens", "choices", "close_choices", "whole_rationale", "continue_final_message",
    "ignore_eos", "tools", "response_format", "logit_bias", "user", "__proto__", "__class__", "", "self", "x_tot",
    "reasoning", "reasoning_effort", "text", "input", "instructions", "include", "max_output_tokens",
)  # fmt: skip
PATHS = ("/v1/chat/completions", "/v1/completions", "/v1/responses")


def body_of(rng: random.Random, path: str) -> bytes:
    """Return a body with odd values in some fields; one of five is damaged, too."""
    body: dict[str, Any] = {"model": rng.choice(["tiny", "tiny:seed", "tiny:pdos", "tiny:jacobi"])}
    text: dict[str, Any] = {"input": rng.choice(["Hm.", [HM]])}
    if path != "/v1/responses":
        text = {"messages": [HM]} if "chat" in path else {"prompt": rng.choice(["Hm.", ["a", "b"], [5, 6]])}
    body |= text
    body |= {"max_tokens": rng.randint(1, 6), "stream": rng.random() < 0.3}
    body |= {rng.choice(FIELDS): rng.choice(ODD) for _ in range(rng.randint(0, 3))}
    if rng.random() < 0.2:
        names, values = ["role", "content", "name", "x"], [*ODD, "user", "assistant", "system"]
        body["input" if "input" in text else "messages"] = [
            {rng.choice(names): rng.choice(values) for _ in "12"} for _ in range(rng.randint(0, 3))
        ]
    content = bytearray(json.dumps(body, ensure_ascii=rng.random() < 0.5).encode(errors="surrogatepass"))
    for _ in range(rng.randint(1, 8) if rng.random() < 0.2 else 0):
        at = rng.randrange(len(content))
        content[at : at + rng.randint(0, 3)] = rng.randbytes(rng.randint(0, 3))
    return bytes(content)


@pytest.mark.parametrize("count", [100, pytest.param(10_000, marks=pytest.mark.slow)])
def test_hostile_bodies_neither_crash_the_server_nor_leave_anything_behind(tiny: Any, count: int) -> None:
    decoder = tiny()
    limits = Limits(max_tokens_limit=40, max_body=16_000, max_samples=8, concurrency=8, queue=100)
    methods = DecodingMethods("tiny", decoder, limits)
    app = make_app(Service([methods], limits, {}))
    fine = {"model": "tiny", "prompt": "Hm.", "max_tokens": 20, "seed": 5}
    statuses: Counter[int] = Counter()

    async def one(http: httpx.AsyncClient, rng: random.Random) -> None:
        path = rng.choice(PATHS)
        content, headers = body_of(rng, path), {"content-type": "application/json"}
        sending = asyncio.ensure_future(http.post(path, headers=headers, content=content))
        if rng.random() < 0.05:  # the client disconnects
            await asyncio.sleep(rng.random() * 0.02)
            sending.cancel()
            return
        reply = await sending
        statuses[reply.status_code] += 1
        assert reply.status_code in (200, 400, 404), (path, content, reply.text)
        if reply.status_code >= 400:
            assert set(reply.json()["error"]) == {"message", "type", "param", "code"}

    async def main() -> None:
        transport = httpx.ASGITransport(app=app)  # exceptions of the application are raised here
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost", timeout=60) as http:
            before = (await http.post(PATHS[1], json=fine)).json()["choices"]
            rng = random.Random(20)
            for _ in range(0, count, 20):
                await asyncio.gather(*(one(http, rng) for _ in range(20)))
            assert (await http.post(PATHS[1], json=fine)).json()["choices"] == before
            while decoder.engine.cache.live:
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.05)
            assert (methods.gate.running, methods.gate.waiting) == (0, 0)
            assert asyncio.all_tasks() == {asyncio.current_task()}

    with decoder:
        asyncio.run(main())
        methods.close()
    assert statuses[200] > count // 20
    assert statuses[400] > count // 4
