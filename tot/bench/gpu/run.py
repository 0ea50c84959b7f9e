"""`tot bench gpu`: what packing, parallel steps and drafting bring on a GPU, on models of 7B's sizes, in minutes.

Models one after another, each with an equal share of the time that is left; of each, parts in order of importance.
What is known is written after every round, what did not fit or failed is named.
"""

from __future__ import annotations

import contextlib
import gc
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from tot.bench.gpu.fastcot import caps, figure_2
from tot.bench.gpu.gauge import Gauge, Sample
from tot.bench.gpu.models import SHAPES
from tot.bench.gpu.packed import limits, packed
from tot.bench.gpu.pdos import pdos
from tot.bench.gpu.seed import seed
from tot.bench.gpu.sides import Amounts, Bench, Found, Stages
from tot.bench.gpu.tables import show
from tot.decoders.errors import OptionError, unknown
from tot.decoders.files import write_json
from tot.decoders.models.loading import resolve_device
from tot.machine import describe

FORMAT = 1
"""Of the file that is written."""
PARTS: dict[str, Callable[[Bench], Stages]] = {
    "limits": limits,
    "packed": packed,
    "pdos": pdos,
    "seed": seed,
    "figure_2": figure_2,
    "caps": caps,
}
"""In order of importance."""


@dataclass(frozen=True)
class Options:
    """What is asked for. Raises OptionError for what there is none of."""

    out: Path
    shapes: Sequence[str] = ("llama-2-7b", "qwen2.5-7b")
    parts: Sequence[str] = tuple(PARTS)
    device: str = "cuda"
    minutes: float = 9.0
    amounts: Amounts = field(default_factory=Amounts)

    def __post_init__(self) -> None:
        for kind, given, known in (("shape", self.shapes, SHAPES), ("part", self.parts, PARTS)):
            for name in given:
                if name not in known:
                    raise OptionError(unknown(kind, name, known))
        if self.device != "cpu" and not torch.cuda.is_available():
            raise OptionError(
                "torch finds no CUDA device here: run this on a GPU, or try it with --shapes tiny --device cpu"
            )
        if self.device == "cpu" and (large := set(self.shapes) - {"tiny"}):
            raise OptionError(f"{min(large)} would take hours on a CPU: give --shapes tiny, or a GPU")


class Clock:
    """The time there is, in seconds."""

    def __init__(self, seconds: float, now: Callable[[], float] = time.perf_counter) -> None:
        self._now = now
        self._end = now() + seconds

    @property
    def left(self) -> float:
        return self._end - self._now()

    def share(self, of: int) -> Clock:
        """One of so many equal parts of what is left."""
        return Clock(self.left / of, self._now)


@dataclass
class Record:
    """What is known so far, on its way to the file."""

    out: Path
    gauge: Gauge
    console: Console
    numbers: dict[str, Any]
    log: list[tuple[float, str]] = field(default_factory=list)
    """(second, what had just been done)."""

    def say(self, text: str) -> None:
        self.log.append((round(self.gauge.now(), 2), text))
        self.console.print(text, style="dim")

    def fail(self, name: str, error: Exception) -> None:
        self.numbers["failed"][name] = f"{type(error).__name__}: {error}"
        self.say(f"{name} failed: {error}")

    def save(self) -> None:
        gauge = self.gauge
        samples = [(round(each.second, 2), each.percent, round(each.gigabytes, 2)) for each in list(gauge.samples)]
        columns = dict(zip(Sample._fields, zip(*samples, strict=True), strict=False))
        gpu = {"source": gauge.source, "missing": gauge.missing, **columns}
        write_json(self.out, self.numbers | {"seconds": gauge.now(), "log": self.log, "gpu": gpu})


def run(options: Options, console: Console) -> None:
    """Measure, write and print. Ctrl-C ends it with what is known by then."""
    device = resolve_device(options.device)
    clock = Clock(60 * options.minutes)
    numbers: dict[str, Any] = {
        "format": FORMAT,
        "machine": describe(device, torch.bfloat16),
        "amounts": asdict(options.amounts),
        "models": {shape: {} for shape in options.shapes},
        "left_out": {},
        "failed": {},
    }
    with Gauge(device) as gauge:
        record = Record(options.out, gauge, console, numbers)
        with contextlib.suppress(KeyboardInterrupt):
            for i, shape in enumerate(options.shapes):
                record.say(f"{shape} …")
                try:
                    bench = Bench.open(shape, device, options.amounts, gauge, record.say)
                except Exception as error:  # no room, say: another model may have some  # noqa: BLE001
                    record.fail(shape, error)
                    continue
                measure(bench, options.parts, clock.share(len(options.shapes) - i), record)
                del bench
                _empty(device)
        record.save()
    show(numbers, console)
    console.print(f"numbers: {options.out}")


def measure(bench: Bench, parts: Sequence[str], clock: Clock, record: Record) -> None:
    """The parts of one model, as many as there is time for."""
    for part in parts:
        name = f"{bench.name}, {part}"
        if clock.left <= 0:
            record.numbers["left_out"][name] = "no time was left"
            continue
        record.say(f"{name} …")
        began = record.gauge.now()
        results: Found = {}
        record.numbers["models"][bench.name][part] = results
        try:
            whole = _stages(PARTS[part](bench), results, clock, record)
        except Exception as error:  # one part's fault is not the others'  # noqa: BLE001
            record.fail(name, error)
        else:
            if not whole:
                record.numbers["left_out"][name] = "its last rounds: no time was left"
        busy = record.gauge.between(began, record.gauge.now())
        results["seconds_in_all"] = record.gauge.now() - began
        results["gpu_percent_in_all"] = statistics.fmean(busy) if busy else None
        record.save()
        _empty(bench.ours.device)


def _stages(part: Stages, results: Found, clock: Clock, record: Record) -> bool:
    """Go through a part while its next stage may be expected to fit: it takes as long as the longest so far.

    True where it came to its end.
    """
    longest = 0.0
    with contextlib.closing(part):
        while clock.left > longest:
            before = clock.left
            try:
                results |= next(part)
            except StopIteration as end:
                results |= end.value
                return True
            longest = max(longest, before - clock.left)
            record.save()
    return False


def _empty(device: torch.device) -> None:
    """Free what nobody holds."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
