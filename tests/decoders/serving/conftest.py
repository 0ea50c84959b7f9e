"""Servers on free loopback ports, each in its own thread, over the tiny random model, with OpenAI clients.

After each test, all of its server's slots must be free and none of its requests may remain.
"""

from __future__ import annotations

import asyncio
import re
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx2 as httpx
import openai
import pytest
from transformers.utils import logging

from tot.decoders import LocalDecoder
from tot.decoders.serving.app import make_app
from tot.decoders.serving.options import Limits
from tot.decoders.serving.server import HTTPServer, address_of, listen
from tot.decoders.serving.service import Service

MODEL = "tiny"


class Running:
    """A running server."""

    def __init__(
        self, decoder: LocalDecoder, key: str | None, hosts: Any, options: dict[str, Any], limits: Any
    ) -> None:
        self.decoder = decoder
        self.service = Service(MODEL, decoder, Limits(**limits), options)
        listening = listen("127.0.0.1", 0)
        self.url = address_of(listening)
        self.server = HTTPServer(make_app(self.service, key, hosts, "a machine"), self.service)
        self.tasks_left: set[Any] = set()
        self._thread = threading.Thread(target=self._run, args=(listening,), daemon=True)
        self._thread.start()

    def _run(self, listening: Any) -> None:
        async def main() -> None:
            await self.server.serve(sockets=[listening])
            self.tasks_left = asyncio.all_tasks() - {asyncio.current_task()}

        asyncio.run(main())

    def client(self, key: str = "any", **options: Any) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=key, **{"max_retries": 0, "timeout": 60} | options)

    def asynchronous(self, **options: Any) -> openai.AsyncOpenAI:
        settings = {"max_retries": 0, "timeout": 120} | options
        return openai.AsyncOpenAI(base_url=f"{self.url}/v1", api_key="any", **settings)

    def post(self, path: str = "/v1/completions", **options: Any) -> httpx.Response:
        return httpx.post(self.url + path, timeout=60, **options)

    def metric(self, name: str) -> float:
        """Sum a metric over its labels."""
        lines = httpx.get(f"{self.url}/metrics").text.splitlines()
        found = [float(line.split()[-1]) for line in lines if line.split("{")[0].split()[0] == name]
        assert found, f"there is no {name}"
        return sum(found)

    @property
    def idle(self) -> bool:
        """Return whether no request is at the gate or the engine, and no slot is in use."""
        gate = self.service.gate
        return not (gate.running or gate.waiting) and self.decoder.engine.cache.live == 0

    def wait_until(self, true: Callable[[], bool], seconds: float = 30) -> None:
        deadline = time.monotonic() + seconds
        while not true():
            assert time.monotonic() < deadline
            time.sleep(0.005)

    def stop(self) -> None:
        self.server.should_exit = True
        self._thread.join(60)
        assert not self._thread.is_alive()


@pytest.fixture
def serve(tiny: Callable[..., LocalDecoder]) -> Iterator[Callable[..., Running]]:
    """Start servers: serve(key=..., hosts=..., kv_budget=..., options=..., and limits)."""
    running: list[Running] = []

    def start(
        key: str | None = None, hosts: Any = (), kv_budget: int = 4000, options: Any = None, **limits: Any
    ) -> Running:
        running.append(Running(tiny(kv_budget=kv_budget), key, hosts, options or {}, {"max_tokens": 300} | limits))
        return running[-1]

    yield start
    for server in running:
        with closing(server.decoder):
            server.wait_until(lambda server=server: server.idle)
            server.stop()
            server.service.close()
            assert server.tasks_left == set()


@pytest.fixture
def server(serve: Callable[..., Running]) -> Running:
    return serve()


@pytest.fixture
def client(server: Running) -> Iterator[openai.OpenAI]:
    with server.client() as client:
        yield client


@pytest.fixture
def says() -> Callable[[str], list[dict[str, str]]]:
    """Return a chat with one user message."""
    return lambda text: [{"role": "user", "content": text}]


@pytest.fixture(autouse=True)
def _no_error_is_a_crash(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Check that the server's log has no traceback, regardless of the client's requests."""
    yield
    assert [record for record in caplog.records if record.exc_info] == []


# -- as a program ----------------------------------------------------------------------------------


@pytest.fixture
def folder(tiny: Callable[..., Any], tmp_path: Path) -> Path:
    """Save the tiny model as a folder."""
    place = tmp_path / "tiny"
    with tiny() as decoder:
        pass  # restores the model's own attention
    logging.disable_progress_bar()
    decoder.model.save_pretrained(place)
    logging.enable_progress_bar()
    decoder.tokenizer.save_pretrained(place)
    return place


class Program:
    """A running `tot serve`. `said` holds the lines that it wrote before it was ready."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.said: list[str] = []
        assert process.stderr is not None
        for line in process.stderr:
            self.said.append(line)
            if found := re.search(r" is served at (http://\S+)/v1$", line):
                self.url = found[1]
                return
        raise AssertionError("".join(self.said))

    def metric(self, name: str) -> float:
        return float(re.findall(rf"^{name} (\S+)$", httpx.get(f"{self.url}/metrics").text, re.MULTILINE)[0])

    def end(self) -> tuple[int, str, str]:
        """Return the exit status and the output written since the program was ready."""
        out, err = self.process.communicate(timeout=60)
        return self.process.returncode, out, err


@pytest.fixture
def start(python: Any, folder: Path) -> Callable[..., Program]:
    def run(*options: str, **environment: Any) -> Program:
        arguments = ("--model", str(folder), "--dtype", "fp32", "--port", "0", "--kv-budget", "12000", *options)
        return Program(python("-m", "tot.cli.app", "serve", *arguments, **environment))

    return run
