"""Gauge: how busy the GPU is over time, sampled in a thread: by torch (pynvml), else by nvidia-smi."""

from __future__ import annotations

import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import NamedTuple

import torch

from tot.bench.peers.side import Side, Work
from tot.bench.peers.waves import Wave

_EVERY = {"pynvml": 0.1, "nvidia-smi": 1.0}
"""Seconds between samples."""


class Sample(NamedTuple):
    second: float
    """Since the gauge was made."""
    percent: int
    """Of the time just before in which a kernel ran."""
    gigabytes: float
    """Of the device's memory, in use by anyone."""


class Gauge:
    """Samples while it is open. Without a way to, `source` is empty and `missing` says why."""

    def __init__(self, device: torch.device) -> None:
        self.samples: list[Sample] = []
        self.source, self.missing, self._percent = _source(device)
        self._device = device
        self._began = time.perf_counter()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="tot-gauge", daemon=True)

    def now(self) -> float:
        """Seconds since the gauge was made."""
        return time.perf_counter() - self._began

    def between(self, began: float, ended: float) -> list[int]:
        """The percentages sampled from one second to another."""
        return [sample.percent for sample in self.samples if began <= sample.second <= ended]

    def _watch(self) -> None:
        while not self._ended.wait(_EVERY[self.source]):
            try:
                percent = self._percent()
                free, total = torch.cuda.mem_get_info(self._device)
            except Exception as error:  # a driver that does not tell: the benchmark goes on  # noqa: BLE001
                self.missing = f"{self.source} failed: {error}"
                return
            self.samples.append(Sample(self.now(), percent, (total - free) / 1e9))

    def __enter__(self) -> Gauge:
        if self.source:
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        if self.source:
            self._thread.join()


def _source(device: torch.device) -> tuple[str, str, Callable[[], int]]:
    """(what tells, or why nothing does, how to ask)."""
    if device.type != "cuda":
        return "", f"{device.type} is no GPU", lambda: 0
    try:
        torch.cuda.utilization(device)
        return "pynvml", "", lambda: torch.cuda.utilization(device)
    except Exception:  # no pynvml, or one that finds no driver  # noqa: BLE001
        pass
    if shutil.which("nvidia-smi") is None:
        return "", "neither pynvml nor nvidia-smi is there", lambda: 0
    index = torch.cuda.current_device() if device.index is None else device.index
    query = ["nvidia-smi", f"--id={index}", "--query-gpu=utilization.gpu", "--format=csv,noheader,nounits"]
    return "nvidia-smi", "", lambda: int(subprocess.run(query, check=True, capture_output=True, text=True).stdout)


class Watched:
    """A side, and how busy the device was while it was at work."""

    def __init__(self, side: Side, gauge: Gauge) -> None:
        self.name, self.about, self.most, self.searches = side.name, side.about, side.most, side.searches
        self.percent: dict[int, list[int]] = {}
        """By number of samples."""
        self._side = side
        self._gauge = gauge

    def run(self, waves: Sequence[Wave]) -> Work:
        began = self._gauge.now()
        work = self._side.run(waves)
        samples = sum(len(asked.samples) for wave in waves for asked in wave)
        self.percent.setdefault(samples, []).extend(self._gauge.between(began, self._gauge.now()))
        return work

    def close(self) -> None:
        self._side.close()
