"""Sides that take as long as they are told, and workers that do as they are told."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tot.bench.harness import Measured
from tot.bench.peers.sides import Peer
from tot.bench.peers.worker import PeerWorker
from tot.bench.workloads import Waves, drawn

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


@pytest.fixture
def log() -> list[tuple[str, int]]:
    """(side, samples) of all that paced sides were asked, in order."""
    return []


@pytest.fixture
def paced(log: list[tuple[str, int]]) -> Callable[..., Peer]:
    """Makes sides whose work takes `seconds(samples)`, or raises, and keeps what they were asked."""

    def make(name: str, seconds: Callable[[int], float], **options: Any) -> Peer:
        def run(waves: Waves) -> Measured:
            samples = sum(len(asked.samples) for wave in waves for asked in wave)
            log.append((name, samples))
            return {"seconds": seconds(samples), "tokens": drawn(waves)}

        return Peer(name, run, "scripted", **options)

    return make


@pytest.fixture
def worker(tmp_path: Path) -> Iterator[Callable[..., PeerWorker]]:
    """Starts a worker that answers, or "dies", "hangs", "errs" or draws too few ("short")."""
    script = tmp_path / "worker.py"
    script.write_text(WORKER)
    started: list[PeerWorker] = []

    def start(model: str = "well", **options: Any) -> PeerWorker:
        started.append(PeerWorker(Path(sys.executable), script, {"model": model}, **options))
        return started[-1]

    yield start
    for one in started:
        one.close()
