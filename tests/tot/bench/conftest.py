"""Sides that take as long as they are told, and workers that do as they are told."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tot.bench.peers.side import Work, drawn
from tot.bench.peers.waves import Wave
from tot.bench.peers.worker import Worker

WORKER = """
import json, sys, time
load = json.loads(sys.stdin.readline())
print("starting up: {not JSON", flush=True)
print('"a string"', flush=True)
print(json.dumps({"about": "fake 1.0 with " + load["model"]}), flush=True)
for line in sys.stdin:
    waves = json.loads(line)["waves"]
    tokens = sum(sum(asked["new"]) for wave in waves for asked in wave)
    if load["model"] == "dies":
        print("out of memory", file=sys.stderr)
        sys.exit(3)
    if load["model"] == "hangs":
        time.sleep(60)
    if load["model"] == "errs":
        print(json.dumps({"error": "too many sequences"}), flush=True)
        continue
    print("chatter", flush=True)
    print(json.dumps({"seconds": 0.5, "tokens": tokens - (load["model"] == "short")}), flush=True)
"""


class Paced:
    """A side whose work takes `seconds(prompts, samples)`, or raises; it keeps what it was asked."""

    about = "scripted"

    def __init__(
        self,
        name: str,
        seconds: Callable[[int], float],
        log: list[tuple[str, int]],
        *,
        most: int | None = None,
        searches: bool = True,
    ) -> None:
        self.name, self.most, self.searches = name, most, searches
        self._seconds, self._log = seconds, log

    def run(self, waves: Sequence[Wave]) -> Work:
        samples = sum(len(asked.samples) for wave in waves for asked in wave)
        self._log.append((self.name, samples))
        return Work(self._seconds(samples), drawn(waves))

    def close(self) -> None:
        """Nothing is held."""


@pytest.fixture
def log() -> list[tuple[str, int]]:
    """(side, samples) of all that paced sides were asked, in order."""
    return []


@pytest.fixture
def paced(log: list[tuple[str, int]]) -> Callable[..., Paced]:
    """Makes sides: paced("name", seconds_by_samples)."""

    def make(name: str, seconds: Callable[[int], float], **options: Any) -> Paced:
        return Paced(name, seconds, log, **options)

    return make


@pytest.fixture
def worker(tmp_path: Path) -> Iterator[Callable[..., Worker]]:
    """Starts a worker that answers, or "dies", "hangs", "errs" or draws too few ("short")."""
    script = tmp_path / "worker.py"
    script.write_text(WORKER)
    started: list[Worker] = []

    def start(model: str = "well", **options: Any) -> Worker:
        started.append(Worker("fake", Path(sys.executable), script, {"model": model}, **options))
        return started[-1]

    yield start
    for one in started:
        one.close()
