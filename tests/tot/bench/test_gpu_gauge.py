"""How busy the device is: samples over time, and those of one side."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from tot.bench.gpu.gauge import Gauge, Sample, Watched
from tot.bench.peers.side import Work, branches
from tot.bench.peers.waves import Wave


@pytest.fixture
def gauge(monkeypatch: pytest.MonkeyPatch) -> Gauge:
    """A gauge whose clock says 1, 2, 3, …, with a sample half a second after each of them."""
    made = Gauge(torch.device("cpu"))
    seconds = iter(range(1, 100))
    monkeypatch.setattr(made, "now", lambda: float(next(seconds)))
    made.samples = [Sample(i + 0.5, 10 * i, 1.0) for i in range(10)]
    return made


def test_without_a_gpu_it_says_so_and_samples_nothing() -> None:
    with Gauge(torch.device("cpu")) as gauge:
        assert gauge.missing == "cpu is no GPU"
    assert (gauge.source, gauge.samples) == ("", [])


@pytest.fixture
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], None]:
    """Has torch tell of a GPU as `ask` does."""

    def pretend(ask: Any) -> None:
        monkeypatch.setattr("torch.cuda.utilization", ask)
        monkeypatch.setattr("torch.cuda.mem_get_info", lambda device: (2 * 10**9, 10 * 10**9))
        monkeypatch.setattr("torch.cuda.current_device", lambda: 0)
        monkeypatch.setattr("tot.bench.gpu.gauge._EVERY", {"pynvml": 0.001, "nvidia-smi": 0.001})

    return pretend


def wait_for(done: Callable[[], Any]) -> None:
    until = time.monotonic() + 20
    while not done() and time.monotonic() < until:
        time.sleep(0.002)


def test_it_samples_what_torch_tells_until_it_is_closed(on_gpu: Any) -> None:
    on_gpu(lambda device: 37)
    with Gauge(torch.device("cuda")) as gauge:
        wait_for(lambda: len(gauge.samples) > 2)
    count = len(gauge.samples)
    assert gauge.source == "pynvml"
    assert {(sample.percent, sample.gigabytes) for sample in gauge.samples} == {(37, 8.0)}
    assert count > 2
    assert gauge.between(0.0, gauge.now()) == [37] * count


def test_without_pynvml_it_asks_nvidia_smi(on_gpu: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    def no_pynvml(device: Any) -> int:
        raise ModuleNotFoundError("nvidia-ml-py does not seem to be installed")

    program = tmp_path / "nvidia-smi"
    program.write_text('#!/bin/sh\n[ "$1" = --id=0 ] && echo 91\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    on_gpu(no_pynvml)
    with Gauge(torch.device("cuda")) as gauge:
        wait_for(lambda: gauge.samples)
    assert gauge.source == "nvidia-smi"
    assert gauge.samples[0].percent == 91


def test_a_driver_that_stops_telling_ends_the_samples_and_is_named(on_gpu: Any) -> None:
    answers = iter([50, 51])
    on_gpu(lambda device: next(answers))
    with Gauge(torch.device("cuda")) as gauge:
        wait_for(lambda: gauge.missing)
    assert [sample.percent for sample in gauge.samples] == [51]
    assert gauge.missing.startswith("pynvml failed: ")


class Quick:
    name, about, most, searches = "quick", "scripted", 4, True

    def run(self, waves: Sequence[Wave]) -> Work:
        return Work(2.0, 8)

    def close(self) -> None:
        """Nothing is held."""


def test_a_side_has_the_samples_of_its_own_time(gauge: Gauge) -> None:
    side = Watched(Quick(), gauge)
    assert side.run(branches([1], 2, 4)) == Work(2.0, 8)  # from 1 to 2
    side.run(branches([1], 3, 4))
    side.run(branches([1], 2, 4))
    assert side.percent == {2: [10, 50], 3: [30]}
    assert (side.name, side.most) == ("quick", 4)
