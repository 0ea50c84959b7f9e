"""Many concurrent clients: shared forwards, the same texts as alone, and no effect of clients that disconnect."""

from __future__ import annotations

import asyncio
import json
import threading
from typing import Any

import httpx2 as httpx
import openai
import pytest

from tot.decoders import Request, Sampling, load_decoder
from tot.decoders.budget import Meter
from tot.decoders.engine.sequence import Handle
from tot.decoders.serving.app import make_app
from tot.decoders.serving.completions import DecodingMethods
from tot.decoders.serving.limits import Limits
from tot.decoders.serving.service import Service

CLIENTS = 64


def request(i: int) -> dict[str, Any]:
    return {"prompt": f"Client {i} says", "max_tokens": 10 + i % 23, "temperature": 1.0, "seed": i}


async def streamed(client: openai.AsyncOpenAI, i: int) -> str:
    pieces = await client.completions.create(model="tiny", stream=True, **request(i))
    return "".join([chunk.choices[0].text async for chunk in pieces])


def test_64_concurrent_streams_equal_each_alone_and_share_forwards(serve: Any) -> None:
    server = serve(kv_budget=8000)
    engine = server.decoder.engine
    alone, before = [], engine.forwards
    for i in range(CLIENTS):
        fields = request(i)
        (completion,) = server.decoder.generate([Request(prompt=fields.pop("prompt"), sampling=Sampling(**fields))])
        alone.append(completion.text)
    serial = engine.forwards - before
    engine.cache.clear()
    most_threads = 0

    async def main() -> list[str]:
        nonlocal most_threads
        client = server.asynchronous()
        async with client:
            texts = asyncio.gather(*(streamed(client, i) for i in range(CLIENTS)))
            while not texts.done():
                most_threads = max(most_threads, threading.active_count())
                await asyncio.sleep(0.002)
            return await texts

    before, threads = engine.forwards, threading.active_count()
    assert asyncio.run(main()) == alone
    packed = engine.forwards - before
    assert serial > CLIENTS * 10
    assert packed < serial / 5
    assert most_threads - threads < 20  # streams need no threads of their own


def endless(n: int = 1) -> dict[str, Any]:
    body = {"model": "tiny", "prompt": "x", "max_tokens": 300, "n": n}
    return body | {"ignore_eos": True, "temperature": 1.0, "seed": 1}


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_disconnects_frees_its_branches_while_another_continues(serve: Any, stream: bool) -> None:
    server = serve(max_tokens_limit=450)
    engine = server.decoder.engine
    sampling = {"max_tokens": 450, "temperature": 1.0, "seed": 3}
    local = Request(prompt="Stay.", sampling=Sampling(**sampling, ignore_eos=True))
    (expected,) = server.decoder.generate([local])

    async def main() -> str:
        async with httpx.AsyncClient(base_url=server.url, timeout=60) as http, server.asynchronous() as client:
            staying = asyncio.create_task(
                client.completions.create(model="tiny", prompt="Stay.", **sampling, extra_body={"ignore_eos": True})
            )
            while not engine.cache.live:
                await asyncio.sleep(0.001)
            leaving = asyncio.create_task(_take(http, {**endless(n=4), "stream": stream}))
            while server.gate.running < 2 or engine.cache.live < 40:
                await asyncio.sleep(0.001)
            peak = engine.cache.live
            leaving.cancel()
            while engine.cache.live >= peak:  # nothing else reduces it while the other request runs
                await asyncio.sleep(0.001)
            assert not staying.done()
            return (await staying).choices[0].text

    text = asyncio.run(main())
    assert text == expected.text
    server.wait_until(lambda: server.idle)
    assert engine.cache.peak_live < 4 * 300 + 450  # the four abandoned samples did not run to their ends
    assert server.metric("tot_disconnects_total") == 1


async def _take(http: httpx.AsyncClient, body: dict[str, Any]) -> None:
    async with http.stream("POST", "/v1/completions", json=body) as reply:
        async for _ in reply.aiter_bytes():
            pass


def test_a_client_that_disconnects_during_prefill_is_not_decoded(server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    reading, go_on, cancelled = threading.Event(), threading.Event(), threading.Event()
    submit, cancel, engine = server.decoder.submit, Handle.cancel, server.decoder.engine

    def slowly(*arguments: Any) -> Any:
        reading.set()
        go_on.wait(20)
        return submit(*arguments)

    def noticed(handle: Handle) -> None:
        cancel(handle)
        cancelled.set()

    monkeypatch.setattr(server.decoder, "submit", slowly)
    monkeypatch.setattr(Handle, "cancel", noticed)

    async def main() -> None:
        async with httpx.AsyncClient(base_url=server.url, timeout=60) as http:
            leaving = asyncio.create_task(_take(http, endless()))
            await asyncio.to_thread(reading.wait, 20)
            leaving.cancel()
            while server.gate.running:
                await asyncio.sleep(0.001)
            go_on.set()

    stalled = threading.Thread(target=engine.call, args=(lambda: cancelled.wait(20),))
    stalled.start()
    asyncio.run(main())
    assert cancelled.wait(20)  # it was submitted, and cancelled before the engine's next step
    stalled.join()
    server.wait_until(lambda: server.idle)
    assert engine.forwards == 0


def test_a_client_that_does_not_read_times_out(tiny: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    timeout, limits = asyncio.timeout, []

    def limited(seconds: float | None) -> asyncio.Timeout:
        limits.append((seconds, timeout(60)))
        return limits[-1][1]

    monkeypatch.setattr("tot.decoders.serving.delivery.asyncio.timeout", limited)
    headers = [(b"host", b"localhost"), (b"content-type", b"application/json")]
    scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": headers, "http_version": "1.1"}
    scope |= {"scheme": "http", "query_string": b"", "root_path": "", "server": ("localhost", 80)}
    messages = [{"type": "http.request", "body": json.dumps({**endless(), "stream": True}).encode()}]
    sent = []

    async def receive() -> Any:
        return messages.pop() if messages else await asyncio.Event().wait()

    async def send(message: Any) -> None:
        sent.append(message["type"])
        if len(sent) > 3:
            ((_, limit),) = [one for one in limits if one[0] == 50 + 10]
            limit.reschedule(0)  # as if its time were over
            await asyncio.Event().wait()

    with tiny() as decoder:
        given = Limits(timeout=50, max_tokens_limit=300)
        methods = DecodingMethods("tiny", decoder, given)
        app = make_app(Service([methods], given, {}))
        asyncio.run(asyncio.wait_for(app(scope, receive, send), 20))
        assert (methods.gate.running, methods.gate.waiting) == (0, 0)
    assert sent == ["http.response.start", *["http.response.body"] * 3]


def test_requests_beyond_the_queue_get_retry_after(serve: Any) -> None:
    server = serve(concurrency=2, queue=1)

    async def main() -> list[Any]:
        async with server.asynchronous() as client:
            body = endless()
            fields = {"extra_body": {"ignore_eos": body.pop("ignore_eos")}, **body}
            running = []
            for _ in range(3):
                running.append(asyncio.create_task(client.completions.create(**fields)))
                while server.gate.running + server.gate.waiting < len(running):
                    await asyncio.sleep(0.001)
            with pytest.raises(openai.RateLimitError) as refused:
                await client.completions.create(**fields)
            assert refused.value.response.headers["retry-after"] == "1"
            assert refused.value.code == "queue_full"
            return await asyncio.gather(*running)

    assert len({reply.choices[0].text for reply in asyncio.run(main())}) == 1
    assert server.metric("tot_requests_running") == 0


# -- time limits -----------------------------------------------------------------------------------


def test_at_the_time_limit_the_text_so_far_is_the_reply(serve: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Meter, "seconds", property(lambda meter: 6.0 * meter.forwards))
    server = serve(timeout=60.0, max_tokens_limit=450)
    body = {**endless(), "max_tokens": 450}
    whole = server.post("/v1/completions", **body).json()
    (choice,) = whole["choices"]
    assert choice["finish_reason"] == "length"
    assert 0 < whole["usage"]["completion_tokens"] < 450
    with httpx.stream("POST", f"{server.url}/v1/completions", json={**body, "stream": True}, timeout=60) as reply:
        events = [line for line in reply.iter_lines() if line]
    assert events[-1] == "data: [DONE]"
    assert '"finish_reason":"length"' in events[-2]
    assert 5 < len(events) < 20


@pytest.mark.parametrize("stream", [True, False])
def test_at_the_time_limit_without_text_the_reply_is_an_error(serve: Any, stream: bool) -> None:
    server = serve(timeout=0.5, concurrency=1)
    lock = server.gate
    for _ in range(2):  # at the gate, and at the engine with a full cache
        asyncio.run(_late(server, stream))
    assert not lock.waiting


async def _late(server: Any, stream: bool) -> None:
    held = threading.Event()
    stalled = threading.Thread(target=server.decoder.engine.call, args=(lambda: held.wait(20),))
    stalled.start()
    try:
        async with httpx.AsyncClient(base_url=server.url, timeout=60) as http:
            body = {**endless(), "stream": stream}
            first = asyncio.create_task(http.post("/v1/completions", json=body))
            while not server.gate.running:
                await asyncio.sleep(0.001)
            second = await http.post("/v1/completions", json=body)
            assert (second.status_code, second.json()["error"]["code"]) == (503, "timeout")
            assert second.headers["retry-after"] == "1"
            held.set()
            reply = await first
            assert (reply.status_code, reply.json()["error"]["code"]) == (503, "timeout")
            assert "nothing was decoded within 0.5 seconds" in reply.json()["error"]["message"]
    finally:
        held.set()
        stalled.join()


def test_a_decoder_whose_client_disconnects_during_setup_is_kept(serve: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    server = serve()
    begun, held, made = threading.Event(), threading.Event(), []

    def slowly(*arguments: Any, **options: Any) -> Any:
        begun.set()
        held.wait(20)
        made.append(load_decoder(*arguments, **options))
        return made[-1]

    monkeypatch.setattr("tot.decoders.serving.completions.load_decoder", slowly)
    body = {"model": "tiny:jacobi", "prompt": "x", "max_tokens": 2}

    async def main() -> None:
        async with httpx.AsyncClient(base_url=server.url, timeout=60) as http:
            leaving = asyncio.create_task(http.post("/v1/completions", json=body))
            await asyncio.to_thread(begun.wait, 20)
            leaving.cancel()
            staying = asyncio.create_task(http.post("/v1/completions", json=body))
            held.set()
            assert (await staying).status_code == 200

    asyncio.run(main())
    assert made == [server.methods.decoder("jacobi")]
