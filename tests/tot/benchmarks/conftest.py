"""Benchmark sides of known speed, and worker processes with known failures."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.harness import Measured
from benchmarks.peers.sides import Peer
from benchmarks.peers.worker import PeerWorker
from benchmarks.workloads import Waves, drawn

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
    reply = {"seconds": 0.5, "prefill": 0.25, "tokens": tokens - (load["model"] == "short")}
    print(json.dumps(reply), flush=True)
"""


@pytest.fixture
def log() -> list[tuple[str, int]]:
    """(side, samples) of every call of a paced side, in order."""
    return []


@pytest.fixture
def paced(log: list[tuple[str, int]]) -> Callable[..., Peer]:
    """Make sides whose work takes `seconds(samples)`, or raises, and log their calls."""

    def make(name: str, seconds: Callable[[int], float], **options: Any) -> Peer:
        def run(waves: Waves) -> Measured:
            samples = sum(len(request.samples) for wave in waves for request in wave)
            log.append((name, samples))
            spent = seconds(samples)
            return {"seconds": spent, "prefill": spent / 2, "tokens": drawn(waves)}

        return Peer(name, run, "scripted", **options)

    return make


@pytest.fixture
def worker(tmp_path: Path) -> Iterator[Callable[..., PeerWorker]]:
    """Start a worker that answers, "dies", "hangs", raises ("errs") or draws too few tokens ("short")."""
    script = tmp_path / "worker.py"
    script.write_text(WORKER)
    workers: list[PeerWorker] = []

    def start(model: str = "well", **options: Any) -> PeerWorker:
        workers.append(PeerWorker(Path(sys.executable), script, {"model": model}, **options))
        return workers[-1]

    yield start
    for one in workers:
        one.close()
