"""Signalled to stop in mid-request, `tot serve` finishes running requests, refuses new ones, and exits cleanly."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
from typing import Any

import httpx2 as httpx
import pytest

ASKED: dict[str, Any] = {"model": "tiny", "prompt": "x", "max_tokens": 450, "seed": 1, "ignore_eos": True, "n": 20}
SHORT = {**ASKED, "max_tokens": 3, "n": 1}


async def until_refused(http: httpx.AsyncClient) -> list[httpx.Response]:
    """Send short requests and return their replies up to the first refusal, or until the server is gone."""
    replies: list[httpx.Response] = []
    try:
        while not replies or replies[-1].status_code != 503:
            replies.append(await http.post("/v1/completions", json=SHORT))
    except httpx.TransportError:  # the socket is closed
        pass
    return replies


async def stop_in_mid_request(
    program: Any, signals: list[int]
) -> tuple[httpx.Response, list[str], list[httpx.Response]]:
    """Return the replies of two requests that run when the signals arrive, and of later requests."""
    async with httpx.AsyncClient(base_url=program.url, timeout=60) as http:

        async def stream() -> list[str]:
            async with http.stream("POST", "/v1/completions", json={**ASKED, "stream": True, "n": 1}) as reply:
                return [line.removeprefix("data: ") async for line in reply.aiter_lines() if line]

        whole = asyncio.create_task(http.post("/v1/completions", json=ASKED))
        pieces = asyncio.create_task(stream())
        while program.metric("tot_requests_running") < 2 or program.metric("tot_forwards_total") < 5:
            await asyncio.sleep(0.01)
        later = []
        for number in signals:
            program.process.send_signal(number)
            later += await until_refused(http)
        while not whole.done():
            try:
                later.append(await http.post("/v1/completions", json=SHORT))
            except httpx.TransportError:  # the socket is closed: nothing runs any more
                break
        return await whole, await pieces, later


@pytest.mark.processes
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_on_a_signal_running_requests_finish_and_new_ones_are_refused(start: Any, number: int) -> None:
    program = start()
    expected = httpx.post(f"{program.url}/v1/completions", json=ASKED, timeout=60).json()["choices"]
    whole, pieces, later = asyncio.run(stop_in_mid_request(program, [number]))
    assert whole.json()["choices"] == expected
    assert pieces[-1] == "[DONE]"
    text = "".join(json.loads(piece)["choices"][0]["text"] for piece in pieces[:-1])
    assert text == expected[0]["text"]
    refused = [reply for reply in later if reply.status_code == 503]
    assert refused
    assert {reply.json()["error"]["code"] for reply in refused} == {"stopping"}
    assert program.end() == (0, "", "")


@pytest.mark.processes
def test_requests_beyond_the_grace_time_are_cancelled_with_an_error(start: Any) -> None:
    program = start("--grace", "0")
    whole, pieces, _ = asyncio.run(stop_in_mid_request(program, [signal.SIGTERM]))
    assert (whole.status_code, whole.json()["error"]["code"]) == (503, "stopping")
    assert json.loads(pieces[-1])["error"]["code"] == "stopping"
    assert len(pieces) < 450
    assert program.end() == (0, "", "")


@pytest.mark.smoke
@pytest.mark.processes
def test_on_a_second_signal_it_does_not_wait(start: Any) -> None:
    program = start("--grace", "600")
    whole, _, _ = asyncio.run(stop_in_mid_request(program, [signal.SIGINT, signal.SIGINT]))
    assert whole.status_code == 503
    assert program.end() == (0, "", "")


@pytest.mark.processes
def test_a_silent_client_does_not_delay_the_exit(start: Any) -> None:
    program = start()
    host, port = program.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as silent, socket.create_connection((host, int(port))) as slow:
        slow.sendall(b"POST /v1/completions HTTP/1.1\r\nContent-")
        assert httpx.get(f"{program.url}/health").status_code == 200
        program.process.send_signal(signal.SIGTERM)
        status, out, _ = program.end()
        assert (status, out) == (0, "")
        assert silent.fileno() > 0
