"""A local Ray cluster of two nodes with one core each, shared by the tests of this folder; slow tasks and decoders."""

from __future__ import annotations

import importlib.util
import os
import secrets
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

from tot.decoders import Completion, ModelError, Request, Usage
from tot.evaluation.run import evaluate

RUN: dict[str, Any] = {"search": "bfs:thoughts=2,breadth=1,depth=3", "evaluator": "value", "max_tokens": 6}
TASK = """
import os
import signal
import time
from pathlib import Path

from tot import Task
from tot.tasks.blocksworld import Blocksworld


class Riddles(Task):
    thought = ("grow",)  # a file beside this one
    templates = {"value": "value {{ thoughts | length }}", "answer": "{{ question }} {{ thoughts[-1].grow }}"}


class Slow(Riddles):
    def score(self, answer, reference):
        Path("searched-in", str(os.getpid())).touch()
        time.sleep(0.5)
        return super().score(answer, reference)


class SlowBlocks(Blocksworld):
    name = "blocksworld"

    def score(self, answer, reference):
        time.sleep(0.5)
        return super().score(answer, reference)


class Deadly(Riddles):
    def score(self, answer, reference):
        if reference == "death":
            with Path("deaths").open("a") as file:
                file.write("x")
            os.kill(os.getpid(), signal.SIGKILL)
        return super().score(answer, reference)
"""


class Echo:
    """A decoder that replies with the prompt after a delay, or fails."""

    def __init__(self, seconds: float = 0.0, fails: bool = False) -> None:
        self.seconds = seconds
        self.fails = fails

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        time.sleep(self.seconds)
        if self.fails:
            raise ModelError("the model is gone: bring it back")
        return [
            Completion(request.prompt[-1].content, (), 0.0, "eos", Usage(new_tokens=5))
            for request in requests
            for _ in range(request.sampling.n)
        ]


@pytest.fixture
def echo() -> type[Echo]:
    return Echo


@pytest.fixture(scope="session", autouse=True)
def _settings() -> Iterator[None]:
    """Environment for Ray's first import: a token for clusters, and fast detection of dead nodes."""
    settings = {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_health_check_period_ms": "500",
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, value in settings.items():
            patch.setenv(name, value)
        yield


@pytest.fixture(scope="session", autouse=True)
def _installed(_settings: None) -> None:
    if importlib.util.find_spec("ray") is None:
        if "CI" in os.environ:
            pytest.fail("ray is not installed: pip install -e .[dev]")
        pytest.skip("needs ray: pip install ray")


@pytest.fixture(scope="session")
def cluster() -> Iterator[Any]:
    """Start a cluster whose processes are children of this process and end with it."""
    from ray.cluster_utils import Cluster

    # Not 127.0.0.1: Ray would replace it with the external address.
    node = {"num_cpus": 1, "node_ip_address": "127.0.0.2", "object_store_memory": 100 * 2**20}
    cluster = Cluster(initialize_head=True, head_node_args={**node, "include_dashboard": False})
    cluster.add_node(**node)
    cluster.again = lambda: cluster.add_node(**node)
    yield cluster
    cluster.shutdown()


@pytest.fixture
def address(cluster: Any) -> str:
    cluster.wait_for_nodes()
    return str(cluster.address)


@pytest.fixture
def task(tmp_path: Path) -> Callable[[str], str]:
    """The name of a class in a task file."""
    (tmp_path / "own.py").write_text(TASK)
    (tmp_path / "grow.jinja").write_text("{{ question }} {{ thoughts | length }}")
    return lambda name: f"{tmp_path / 'own.py'}:{name}"


@pytest.fixture
def run(task: Callable[[str], str], rows: Path, tmp_path: Path) -> Callable[..., Any]:
    """Run evaluate() on the eight rows: run("Slow", out="out", limit=3)."""

    def evaluated(name: str = "Riddles", out: str = "out", **options: Any) -> Any:
        return evaluate(task(name), rows, out=tmp_path / out, **RUN | {"decoder": Echo(), "concurrency": 4} | options)

    return evaluated


def lines(folder: Path) -> list[str]:
    """Return the lines of samples.jsonl without machine-dependent fields."""
    return [line.partition(', "measured"')[0] for line in (folder / "samples.jsonl").read_text().splitlines()]


@pytest.fixture(name="lines")
def _lines() -> Callable[[Path], list[str]]:
    return lines


@pytest.fixture
def unfinished() -> Callable[[Path, Path, int], None]:
    """Copy a folder as it was when it had `samples` samples."""

    def copied(folder: Path, to: Path, samples: int) -> None:
        shutil.copytree(folder, to, ignore=shutil.ignore_patterns(".lock", "results.json"))
        retained = (folder / "samples.jsonl").read_text().splitlines(keepends=True)[:samples]
        (to / "samples.jsonl").write_text("".join(retained))

    return copied


@pytest.fixture
def when() -> Callable[[Callable[[], bool]], None]:
    """Wait until a condition holds, for at most two minutes."""

    def waited(true: Callable[[], bool]) -> None:
        until = time.monotonic() + 120
        while not true():
            assert time.monotonic() < until
            time.sleep(0.05)

    return waited


def workers() -> list[psutil.Process]:
    """The processes of the actors in this process's cluster."""
    processes = []
    for process in psutil.Process().children(recursive=True):
        try:
            if " ".join(process.cmdline()).startswith("ray::Worker"):
                processes.append(process)
        except psutil.NoSuchProcess:
            continue
    return processes


@pytest.fixture(name="workers")
def _workers() -> Callable[[], list[psutil.Process]]:
    return workers
