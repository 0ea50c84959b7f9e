"""`tot serve` as a process on loopback, and checks that a client's reply is complete."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx2 as httpx
import psutil
import pytest

from tot.decoders.serving.limits import KEY_VARIABLE

SEARCHES = """\
vote: {search: "auto:samples=4"}
tree: {search: "bfs:thoughts=2,breadth=2,depth=3,select=all,aggregate=vote"}
exact: {search: "auto:samples=3", reproducible: true}
"""


class Server:
    """A `tot serve` process, which can be killed and started again on the same port with the same cache folder."""

    def __init__(self, home: Path, model: str, *options: str) -> None:
        (home / "searches.yaml").write_text(SEARCHES)
        self._command = [sys.executable, "-m", "tot.cli.app", "serve", "--model", model, "--dtype", "fp32", *options]
        self._command += ["--searches", str(home / "searches.yaml"), "--port"]
        self._log = home / "server.log"
        self._port = "0"
        self.cache = home / "cache"
        self.start()

    def start(self) -> None:
        environment = {name: value for name, value in os.environ.items() if name != KEY_VARIABLE}
        environment |= {"TOT_CACHE": str(self.cache), "OMP_NUM_THREADS": "1"}
        with self._log.open("w") as log:
            self.process = subprocess.Popen([*self._command, self._port], env=environment, stdout=log, stderr=log)
        self.url = self.wait_for(lambda: re.search(r" is served at (http://\S+)/v1$", self.log, re.MULTILINE))[1]
        self._port = self.url.rpartition(":")[2]

    @property
    def log(self) -> str:
        return self._log.read_text()

    def wait_for(self, found: Callable[[], Any], seconds: float = 180) -> Any:
        """Return the first true result."""
        deadline = time.monotonic() + seconds
        while not (result := found()):
            assert self.process.poll() is None, self.log
            assert time.monotonic() < deadline, self.log
            time.sleep(0.05)
        return result

    def post(self, path: str = "/v1/chat/completions", **body: Any) -> httpx.Response:
        return httpx.post(self.url + path, json=body, timeout=300)

    def metrics(self) -> dict[str, float]:
        lines = httpx.get(f"{self.url}/metrics", timeout=60).text.splitlines()
        return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines if line[0] != "#")}

    @property
    def resident(self) -> float:
        """Resident memory in MiB."""
        return float(psutil.Process(self.process.pid).memory_info().rss / 2**20)

    def check_idle(self) -> None:
        """Wait until nothing runs, and check that no request has failed inside the server."""
        busy = [f"tot_{kind}_{state}" for kind in ("requests", "searches") for state in ("running", "waiting")]
        self.wait_for(lambda: not any(self.metrics()[name] for name in (*busy, 'tot_kv_slots{state="live"}')))
        assert "Traceback" not in self.log
        assert "never retrieved" not in self.log

    def stop(self) -> None:
        self.process.kill()
        self.process.wait()


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Callable[..., Server]]:
    """Start a server: serve(model, "--grace", "2")."""
    started: list[Server] = []

    def start(*arguments: str) -> Server:
        started.append(Server(tmp_path, *arguments))
        return started[-1]

    yield start
    for server in started:
        server.stop()


def events_of(text: str) -> list[Any]:
    """Return the events of a stream."""
    lines = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
    return [line if line == "[DONE]" else json.loads(line) for line in lines]


def answer_in(text: str) -> tuple[str, str]:
    """Return the id and the text of a complete reply, whole or streamed. An incomplete or doubled one fails."""
    if not text.startswith("{"):
        return _answer_in_stream(events_of(text))
    reply = json.loads(text)
    if reply["object"] == "response":
        return _answer_in_response(reply)
    choices = reply["choices"]
    assert all(choice["finish_reason"] for choice in choices), text
    return reply["id"], "|".join(one["message"]["content"] if "message" in one else one["text"] for one in choices)


def _answer_in_response(response: dict[str, Any]) -> tuple[str, str]:
    assert response["status"] in ("completed", "incomplete")
    (message,) = [item for item in response["output"] if item["type"] == "message"]
    return response["id"], message["content"][0]["text"]


def _answer_in_stream(events: list[Any]) -> tuple[str, str]:
    if events[0] != "[DONE]" and "type" in events[0]:
        assert [event["sequence_number"] for event in events] == [*range(len(events))]
        (response,) = [
            one["response"] for one in events if one["type"] in ("response.completed", "response.incomplete")
        ]
        name, text = _answer_in_response(response)
        assert [event["text"] for event in events if event["type"] == "response.output_text.done"] == [text]
        return name, text
    assert [number for number, event in enumerate(events) if event == "[DONE]"] == [len(events) - 1]
    (name,) = {event["id"] for event in events[:-1]}
    texts: defaultdict[int, str] = defaultdict(str)
    ends: defaultdict[int, int] = defaultdict(int)
    for choice in [choice for event in events[:-1] for choice in event["choices"]]:
        texts[choice["index"]] += choice["delta"].get("content", "") if "delta" in choice else choice["text"]
        ends[choice["index"]] += choice["finish_reason"] is not None
    assert set(ends.values()) == {1}
    return name, "|".join(texts[index] for index in sorted(texts))


@pytest.fixture(scope="session")
def answer() -> Callable[[str], tuple[str, str]]:
    return answer_in


@pytest.fixture(scope="session")
def events() -> Callable[[str], list[Any]]:
    return events_of


@pytest.fixture
def report(capsys: pytest.CaptureFixture[str]) -> Callable[[str], None]:
    """Print a line with a measured result."""

    def line(text: str) -> None:
        with capsys.disabled():
            sys.stdout.write(f"\n{text}\n")

    return line
