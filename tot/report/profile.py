"""Where a run's time went, and how near its forwards came to what the machine can do.

Seconds are those of the engine's thread, so each is counted once; those that several purposes shared are split by rows,
and a forward that computed prompts beside new text likewise. What a forward takes at least:

    operations = 2 x parameters of linear layers x rows + 4 x layers x heads x head_dim x (pairs of a row and a key)
    bytes      = weights of linear layers + keys and values of every token that is seen, each once

where the layer that makes logits counts for the rows whose logits are read, and weights have the size they are kept in.
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
_AT = {"linear": "linear layers", "attention": "attention", "": "everything else"}
NO_ENGINE = (
    "a profile is of a model that runs here, and none does: leave profile out, or take a decoder other than openai and "
    "a model other than none"
)


class Demand(NamedTuple):
    """What forwards of a model take at least."""

    body: int
    """Weights of the linear layers that all rows go through."""
    head: int
    """Of the one that makes logits."""
    weight_size: float
    """Bytes of a weight."""
    key_operations: int
    """For each pair of a row and a key that it sees."""
    slot_bytes: int
    """Keys and values of one token."""

    @classmethod
    def of(cls, engine: Engine) -> Demand:
        return cls.of_model(engine.loaded, engine.runner.backend.weight_bytes)

    @classmethod
    def of_model(cls, loaded: LoadedModel, weight_size: float) -> Demand:
        """From a model, and the bytes that a weight takes."""
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
    """Some forwards: what they took, in seconds, and what they did."""

    forwards: int
    rows: int
    seconds: float
    bytes: int
    operations: int
    limit: float
    """The seconds that they would have taken at the machine's peak."""


class Profile:
    """Given to `solve(profile=...)`, it is filled there; what goes by from its making on is loading."""

    def __init__(self) -> None:
        self._made = time.perf_counter()
        self.timeline = Timeline(detailed=True)
        self.demand: Demand | None = None

    @contextmanager
    def recording(self, decoders: Iterable[object]) -> Iterator[None]:
        """Record the engine that these decoders share. Raises OptionError where none of them has one."""
        engine = next((decoder.engine for decoder in decoders if isinstance(decoder, LocalDecoder)), None)
        if engine is None:
            raise OptionError(NO_ENGINE)
        self.demand = Demand.of(engine)
        self._device, self._dtype = engine.runner.device, engine.runner.dtype
        loaded = time.perf_counter()
        with recording(engine) as self.timeline:
            self.timeline.spans.append(Span("main", "loading", self._made, loaded))
            yield

    @cached_property
    def machine(self) -> str:
        return describe(self._device, self._dtype)

    @cached_property
    def peak(self) -> tuple[float, float]:
        """Bytes and operations a second that the machine is capable of, measured when first asked for."""
        return read_bandwidth(self._device), matrix_rate(self._dtype, self._device)

    def seconds(self) -> dict[tuple[str, str, str], float]:
        """By purpose, part and what a forward was at; their sum is the time from the making of this to the end.

        Parts: "loading" and "between steps", of no purpose (""); "draft", "sampling", "commit", "scheduling"; and those
        of forwards, "prefill", "decode" and "verify", at "linear", "attention" or anything else ("").
        """
        found: defaultdict[tuple[str, str, str], float] = defaultdict(float)
        for span in self.timeline.spans:
            if span.kind == "loading":
                found["", "loading", ""] += span.ended - span.began
        for path, own in self.timeline.exclusive(LANE):
            kinds = [span.kind for span in path]
            load = path[1].load if len(path) > 1 else None
            if load is None:  # in no step, or in one that failed
                found["", "between steps", ""] += own
                continue
            part = kinds[2] if len(kinds) > 2 else "scheduling"
            at = kinds[-1] if part == "forward" and len(kinds) > 3 else ""
            total = sum(load.rows.values())
            for (purpose, rows), count in load.rows.items():
                found[purpose, rows if part == "forward" else part, at] += own * count / total
        return dict(found)

    def achieved(self) -> dict[str, Achieved]:
        """What the forwards did: those "with prompts", those "without", and "all"."""
        assert self.demand is not None
        found = dict.fromkeys(("with prompts", "without", "all"), Achieved(0, 0, 0.0, 0, 0, 0.0))
        for path, _ in self.timeline.exclusive(LANE):
            if len(path) != 3 or path[2].kind != "forward" or (load := path[1].load) is None:
                continue
            moved, done = self.demand.bytes(load), self.demand.operations(load)
            took = path[2].ended - path[2].began
            one = (1, sum(load.rows.values()), took, moved, done, limit(moved, done, *self.peak))
            prompts = any(kind == "prefill" for _, kind in load.rows)
            for name in ("with prompts" if prompts else "without", "all"):
                found[name] = Achieved(*(a + b for a, b in zip(found[name], one, strict=True)))  # type: ignore[arg-type]
        return {name: achieved for name, achieved in found.items() if achieved.forwards}

    def save(self, path: Path | str) -> None:
        """Write Chrome's trace events, which Perfetto opens. Raises TaskError where that is impossible."""
        bandwidth, rate = self.peak
        about: dict[str, Any] = {"machine": self.machine, "peak bytes/s": bandwidth, "peak FLOP/s": rate}
        about["seconds"] = {", ".join(filter(None, key)): seconds for key, seconds in self.seconds().items()}
        about["forwards"] = {name: achieved._asdict() for name, achieved in self.achieved().items()}
        trace = {"traceEvents": self.timeline.events(), "displayTimeUnit": "ms", "otherData": about}
        write_text(Path(path), json.dumps(trace) + "\n")


def show_profile(profile: Profile, on_stderr: bool = False) -> None:
    """Print where the time went."""
    shown = console(width=120, stderr=on_stderr)
    shown.print(_seconds(profile))
    shown.print(_achieved(profile))


def _seconds(profile: Profile) -> Table:
    """Seconds: a row a part, then a row for each of what forwards were at; a column a purpose."""
    rows: defaultdict[str, defaultdict[str, float]] = defaultdict(lambda: defaultdict(float))
    for (purpose, part, at), seconds in profile.seconds().items():
        within = [f"forwards: {_AT.get(at, at)}"] if part in _FORWARD else []
        for name in (_PARTS[part], "total", *within):
            rows[name][purpose] += seconds
    purposes = list(filter(None, rows["total"]))
    table = Table(
        title="where the time went, in seconds", caption="of a forward's time, each purpose has its rows' share"
    )
    table.add_column("part")
    for heading in (*purposes, "all", "share"):
        table.add_column(heading, justify="right")
    total = sum(rows["total"].values())
    parts = [*_PARTS.values(), "total"]
    rest = f"forwards: {_AT['']}"
    largest_first = sorted(rows.keys() - {*parts}, key=lambda name: (name == rest, -sum(rows[name].values())))
    for name in [*filter(rows.get, parts), *largest_first]:
        whole = sum(rows[name].values())
        cells = [f"{rows[name][purpose]:.2f}" if purpose in rows[name] else "" for purpose in purposes]
        ends = name in ("total", _PARTS["between steps"])
        table.add_row(name, *cells, f"{whole:.2f}", f"{whole / total:.1%}" if total else "", end_section=ends)
    return table


def _achieved(profile: Profile) -> Table:
    """What the forwards did in a second, of what the machine does."""
    bandwidth, rate = profile.peak
    table = Table(
        title="forwards, and what the machine can do",
        caption=f"peak, measured just now: {bandwidth / 1e9:.1f} GB/s read, {rate / 1e9:.1f} GFLOP/s in products of "
        f"matrices\n{profile.machine}",
    )
    table.add_column("forwards")
    for heading in ("number", "rows", "seconds", "GB/s, of peak", "GFLOP/s, of peak", "of the limit"):
        table.add_column(heading, justify="right")
    for name, found in profile.achieved().items():
        moved, done = found.bytes / found.seconds, found.operations / found.seconds
        table.add_row(
            *(name, f"{found.forwards}", f"{found.rows}", f"{found.seconds:.2f}"),
            f"{moved / 1e9:.2f}, {moved / bandwidth:.0%}",
            f"{done / 1e9:.2f}, {done / rate:.0%}",
            f"{found.limit / found.seconds:.0%}",
        )
    return table
