"""Profile a run: seconds by part, and the forwards' throughput relative to the machine's peak.

Seconds are the engine thread's, so each is counted once. Time that several purposes share, or prefill and decode in one
forward, is split by rows. The minimum cost of a forward (a roofline model):

    operations = 2 x parameters of linear layers x rows + 4 x layers x heads x head_dim x (pairs of a row and a key)
    bytes      = weights of linear layers + keys and values of every attended token, each once

The logits layer counts only for the rows whose logits are read. Weights count with their stored size.
"""

from __future__ import annotations

import json
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from rich.table import Table

from tot.decoders.decoder import LocalDecoder
from tot.decoders.engine.engine import Engine
from tot.decoders.engine.recording import recording
from tot.decoders.errors import OptionError
from tot.decoders.files import write_text
from tot.decoders.machine import describe, limit, matrix_rate, read_bandwidth
from tot.decoders.models.loaded import LoadedModel
from tot.decoders.models.shapes import Heads, slot_bytes
from tot.decoders.timeline import LANE, Load, Span, Timeline
from tot.report.terminal import console

_PARTS = {
    "loading": "loading the model",
    "prefill": "prefill",
    "decode": "decode",
    "verify": "verify",
    "draft": "draft",
    "sampling": "sampling",
    "commit": "text and stops",
    "scheduling": "scheduling",
    "between steps": "search, templates, waiting",
}
_FORWARD = ("prefill", "decode", "verify")
_LAYERS = {"linear": "linear layers", "attention": "attention", "": "everything else"}
NO_ENGINE = "a profile needs a local model: leave profile out, or use neither decoder openai nor model none"


class Demand(NamedTuple):
    """The minimum operations and bytes of a model's forwards."""

    body: int
    """Number of weights of the linear layers that all rows use."""
    head: int
    """Number of weights of the logits layer."""
    weight_size: float
    """Bytes per weight."""
    key_operations: int
    """Operations per pair of a row and an attended key."""
    slot_bytes: int
    """Bytes of the keys and values of one token."""

    @classmethod
    def of(cls, engine: Engine) -> Demand:
        return cls.of_model(engine.loaded, engine.runner.backend.weight_bytes)

    @classmethod
    def of_model(cls, loaded: LoadedModel, weight_size: float) -> Demand:
        """Compute the demand of a loaded model with `weight_size` bytes per weight."""
        config, heads = loaded.config, Heads.of(loaded.config)
        key_operations = 4 * config.num_hidden_layers * heads.query * heads.dim
        return cls(*loaded.linear_sizes, weight_size, key_operations, slot_bytes(config, loaded.dtype))

    @property
    def weight_bytes(self) -> int:
        return round(self.weight_size * (self.body + self.head))

    def operations(self, load: Load) -> int:
        rows = sum(load.rows.values())
        return 2 * (self.body * rows + self.head * load.reads) + self.key_operations * load.keys

    def bytes(self, load: Load) -> int:
        return round(self.weight_size * (self.body + (self.head if load.reads else 0))) + self.slot_bytes * load.slots


class Achieved(NamedTuple):
    """Totals of some forwards: seconds, bytes and operations."""

    forwards: int
    rows: int
    seconds: float
    bytes: int
    operations: int
    limit: float
    """Seconds at the machine's peak."""


class Profile:
    """A profile that `solve(profile=...)` fills. Time since its creation until the model is ready counts as loading."""

    def __init__(self) -> None:
        self._created = time.perf_counter()
        self.timeline = Timeline(detailed=True)
        self.demand: Demand | None = None

    @contextmanager
    def recording(self, decoders: Iterable[object]) -> Iterator[None]:
        """Record the engine that these decoders share. Raises OptionError without a local decoder."""
        engine = next((decoder.engine for decoder in decoders if isinstance(decoder, LocalDecoder)), None)
        if engine is None:
            raise OptionError(NO_ENGINE)
        self.demand = Demand.of(engine)
        self._device, self._dtype = engine.runner.device, engine.runner.dtype
        loaded = time.perf_counter()
        with recording(engine) as self.timeline:
            self.timeline.spans.append(Span("main", "loading", self._created, loaded))
            yield

    @cached_property
    def machine(self) -> str:
        return describe(self._device, self._dtype)

    @cached_property
    def peak(self) -> tuple[float, float]:
        """The machine's peak bytes and operations per second, measured on first access."""
        return read_bandwidth(self._device), matrix_rate(self._dtype.name, self._device)

    def seconds(self) -> dict[tuple[str, str, str], float]:
        """Return seconds by (purpose, part, layer kind); their sum is the time from creation to the end.

        Parts without a purpose ("") are "loading" and "between steps"; others are "draft", "sampling", "commit" and
        "scheduling". Parts of forwards are "prefill", "decode" and "verify", with the layer kind "linear", "attention"
        or "" for everything else.
        """
        result: defaultdict[tuple[str, str, str], float] = defaultdict(float)
        for span in self.timeline.spans:
            if span.kind == "loading":
                result["", "loading", ""] += span.ended - span.began
        for path, own in self.timeline.exclusive(LANE):
            kinds = [span.kind for span in path]
            load = path[1].load if len(path) > 1 else None
            if load is None:  # outside a step, or in a failed one
                result["", "between steps", ""] += own
                continue
            part = kinds[2] if len(kinds) > 2 else "scheduling"
            layer = kinds[-1] if part == "forward" and len(kinds) > 3 else ""
            total = sum(load.rows.values())
            for (purpose, rows), count in load.rows.items():
                result[purpose, rows if part == "forward" else part, layer] += own * count / total
        return dict(result)

    def achieved(self) -> dict[str, Achieved]:
        """Return the totals of the forwards "with prompts", "without" and "all"."""
        assert self.demand is not None
        result = dict.fromkeys(("with prompts", "without", "all"), Achieved(0, 0, 0.0, 0, 0, 0.0))
        for path, _ in self.timeline.exclusive(LANE):
            if len(path) != 3 or path[2].kind != "forward" or (load := path[1].load) is None:
                continue
            moved, operations = self.demand.bytes(load), self.demand.operations(load)
            seconds = path[2].ended - path[2].began
            one = (1, sum(load.rows.values()), seconds, moved, operations, limit(moved, operations, *self.peak))
            prompts = any(kind == "prefill" for _, kind in load.rows)
            for name in ("with prompts" if prompts else "without", "all"):
                result[name] = Achieved(*(a + b for a, b in zip(result[name], one, strict=True)))  # type: ignore[arg-type]
        return {name: achieved for name, achieved in result.items() if achieved.forwards}

    def save(self, path: Path | str) -> None:
        """Write Chrome trace events, which Perfetto opens. Raises TaskError if the file can't be written."""
        bandwidth, rate = self.peak
        about: dict[str, Any] = {"machine": self.machine, "peak bytes/s": bandwidth, "peak FLOP/s": rate}
        about["seconds"] = {", ".join(filter(None, key)): seconds for key, seconds in self.seconds().items()}
        about["forwards"] = {name: achieved._asdict() for name, achieved in self.achieved().items()}
        trace = {"traceEvents": self.timeline.events(), "displayTimeUnit": "ms", "otherData": about}
        write_text(Path(path), json.dumps(trace) + "\n")


def show_profile(profile: Profile, on_stderr: bool = False) -> None:
    """Print the tables of a profile."""
    output = console(width=120, stderr=on_stderr)
    output.print(_seconds(profile))
    output.print(_achieved(profile))


def _seconds(profile: Profile) -> Table:
    """Build the table of seconds: a row per part, then a row per layer kind; a column per purpose."""
    rows: defaultdict[str, defaultdict[str, float]] = defaultdict(lambda: defaultdict(float))
    for (purpose, part, layer), seconds in profile.seconds().items():
        within = [f"forwards: {_LAYERS.get(layer, layer)}"] if part in _FORWARD else []
        for name in (_PARTS[part], "total", *within):
            rows[name][purpose] += seconds
    purposes = list(filter(None, rows["total"]))
    table = Table(
        title="where the time went, in seconds", caption="a forward's time is split over purposes by their rows"
    )
    table.add_column("part")
    for heading in (*purposes, "all", "share"):
        table.add_column(heading, justify="right")
    total = sum(rows["total"].values())
    parts = [*_PARTS.values(), "total"]
    rest = f"forwards: {_LAYERS['']}"
    largest_first = sorted(rows.keys() - {*parts}, key=lambda name: (name == rest, -sum(rows[name].values())))
    for name in [*filter(rows.get, parts), *largest_first]:
        whole = sum(rows[name].values())
        cells = [f"{rows[name][purpose]:.2f}" if purpose in rows[name] else "" for purpose in purposes]
        ends = name in ("total", _PARTS["between steps"])
        table.add_row(name, *cells, f"{whole:.2f}", f"{whole / total:.1%}" if total else "", end_section=ends)
    return table


def _achieved(profile: Profile) -> Table:
    """Build the table of the forwards' throughput relative to the machine's peak."""
    bandwidth, rate = profile.peak
    table = Table(
        title="forwards, relative to the machine's peak",
        caption=f"measured peak: {bandwidth / 1e9:.1f} GB/s read, {rate / 1e9:.1f} GFLOP/s in matrix products\n"
        f"{profile.machine}",
    )
    table.add_column("forwards")
    for heading in ("number", "rows", "seconds", "GB/s, of peak", "GFLOP/s, of peak", "of the limit"):
        table.add_column(heading, justify="right")
    for name, total in profile.achieved().items():
        moved, operations = total.bytes / total.seconds, total.operations / total.seconds
        table.add_row(
            *(name, f"{total.forwards}", f"{total.rows}", f"{total.seconds:.2f}"),
            f"{moved / 1e9:.2f}, {moved / bandwidth:.0%}",
            f"{operations / 1e9:.2f}, {operations / rate:.0%}",
            f"{total.limit / total.seconds:.0%}",
        )
    return table
