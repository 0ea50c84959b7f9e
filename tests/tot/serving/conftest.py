"""Servers of searches on free loopback ports, over a scripted chat decoder, with OpenAI clients.

After each test, no search may run or wait, and no sample may be unfinished.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx2 as httpx
import openai
import pytest

from tot.decoders import Completion, Request, Usage
from tot.decoders.budget import Meter
from tot.decoders.serving.app import make_app
from tot.decoders.serving.options import Limits
from tot.decoders.serving.server import HTTPServer, address_of, listen
from tot.decoders.serving.service import Service
from tot.serving.live import Runs
from tot.serving.pages import Pages
from tot.serving.searches import load_searches
from tot.serving.service import Searches

MODEL = "chat"


class Chat:
    """A chat model whose n-th sample is the n-th text, of `tokens` tokens each. It needs no engine, as a remote one.

    A sample that begins with "wait" ends when `free` is set; one that ends with a blank line is not the whole message.
    """

    name = "scripted"
    chats = True

    def __init__(self, *texts: str, tokens: int = 5) -> None:
        self.texts = texts
        self.tokens = tokens
        self.free = threading.Event()
        self.requests: list[Request] = []
        self.unfinished = 0
        self.cancelled = 0

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        raise AssertionError("a server awaits `start`")

    def start(self, requests: Sequence[Request], meter: Meter | None = None) -> list[asyncio.Future[list[Completion]]]:
        return [asyncio.ensure_future(self._all(request, meter or Meter())) for request in requests]

    async def _all(self, request: Request, meter: Meter) -> list[Completion]:
        first = len(self.requests)
        self.requests += [request] * request.sampling.n
        texts = [self.texts[i % len(self.texts)] for i in range(first, first + request.sampling.n)]
        self.unfinished += 1
        try:
            while not self.free.is_set() and any(text.startswith("wait") for text in texts):
                await asyncio.sleep(0.005)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        finally:
            self.unfinished -= 1
        meter.count(new_tokens=self.tokens * len(texts))
        usages = [Usage(prompt_tokens=10 * (i == 0), new_tokens=self.tokens) for i in range(len(texts))]
        return [
            Completion(text, (1,), -1.0, "stop" if text.endswith("\n\n") else "eos", usage, logprobs=(-1.0,))
            for text, usage in zip(texts, usages, strict=True)
        ]


class Running:
    """A running server."""

    def __init__(self, decoder: Any, searches: Path | None, limits: dict[str, Any], key: str | None = None) -> None:
        self.decoder = decoder
        bounds = Limits(**limits)
        self.runs = Runs()
        self.searches = Searches(MODEL, load_searches(searches, decoder), bounds, self.runs)
        self.service = Service(MODEL, decoder, bounds, searches=self.searches)
        listening = listen("127.0.0.1", 0)
        self.url = address_of(listening)
        self.pages = Pages(self.runs, "Searches", lambda: self.searches.gate.closed and not self.searches.gate.running)
        app = make_app(self.service, key, pages=self.pages.router)
        self.server = HTTPServer(app, self.service)
        self.live = self.url + self.pages.path
        self.tasks_left: set[Any] = set()
        self._thread = threading.Thread(target=self._run, args=(listening,), daemon=True)
        self._thread.start()

    def _run(self, listening: Any) -> None:
        async def main() -> None:
            await self.server.serve(sockets=[listening])
            self.tasks_left = asyncio.all_tasks() - {asyncio.current_task()}

        asyncio.run(main())

    def client(self, **options: Any) -> openai.OpenAI:
        settings = {"api_key": "any", "max_retries": 0, "timeout": 60} | options
        return openai.OpenAI(base_url=f"{self.url}/v1", **settings)

    def asynchronous(self, **options: Any) -> openai.AsyncOpenAI:
        settings = {"api_key": "any", "max_retries": 0, "timeout": 60} | options
        return openai.AsyncOpenAI(base_url=f"{self.url}/v1", **settings)

    def post(self, path: str = "/v1/chat/completions", **body: Any) -> httpx.Response:
        return httpx.post(self.url + path, json=body, timeout=60)

    def metrics(self) -> dict[str, float]:
        lines = httpx.get(f"{self.url}/metrics").text.splitlines()
        return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines if line[0] != "#")}

    def wait_until(self, true: Callable[[], bool], seconds: float = 30) -> None:
        deadline = time.monotonic() + seconds
        while not true():
            assert time.monotonic() < deadline
            time.sleep(0.005)

    @property
    def idle(self) -> bool:
        gate = self.searches.gate
        return not (gate.running or gate.waiting or getattr(self.decoder, "unfinished", 0))

    def stop(self) -> None:
        self.server.should_exit = True
        self._thread.join(60)
        assert not self._thread.is_alive()


@pytest.fixture(scope="session")
def chat() -> type[Chat]:
    return Chat


@pytest.fixture(scope="session")
def running() -> type[Running]:
    return Running


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Callable[..., Running]]:
    """Start servers: serve(decoder, searches="vote: {...}", key="..." and limits)."""
    running: list[Running] = []

    def start(decoder: Any, searches: str | None = None, key: str | None = None, **limits: Any) -> Running:
        file = None
        if searches is not None:
            file = tmp_path / "searches.yaml"
            file.write_text(searches)
        running.append(Running(decoder, file, limits, key))
        return running[-1]

    yield start
    for server in running:
        server.wait_until(lambda server=server: server.idle)
        server.stop()
        server.service.close()
        assert server.tasks_left == set()


@pytest.fixture
def user() -> Callable[[str], list[dict[str, str]]]:
    """Return a chat with one user message."""
    return lambda text: [{"role": "user", "content": text}]
