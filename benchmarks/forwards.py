"""Measure the forwards of target and draft, alone and beside each other."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from functools import partial
from random import Random
from statistics import fmean

from rich.table import Table

from benchmarks.harness import timed
from benchmarks.simulation import Machine
from tot.decoders.drafting.drafters import Drafter
from tot.decoders.drafting.latency_model import ROWS, LatencyModel
from tot.decoders.engine.engine import Engine
from tot.decoders.engine.runner import Chunk, Runner
from tot.decoders.engine.sampling import Draw
from tot.decoders.methods.seed import draft_worker

_ROUNDS = 15
_SECONDS = 2.0
"""Time of each measurement of forwards that run beside others."""
_CHAIN = 4
"""Rows of a verification beside a draft."""


class _Probe:
    """Times forwards of new rows after one text."""

    def __init__(self, runner: Runner, context: int) -> None:
        self._runner, self._context, self._random = runner, context, Random(0)
        self._text = runner.cache.open(self._tokens(context))
        runner.forward([Chunk(self._text, 0, context)])

    def _tokens(self, count: int) -> list[int]:
        return self._random.choices(range(int(self._runner.loaded.config.vocab_size)), k=count)

    def seconds(self, rows: int) -> float:
        """Return the seconds of a forward of `rows` rows and of sampling after each of them."""
        cache = self._runner.cache
        branch = cache.fork(self._text)
        cache.extend(branch, self._tokens(rows))
        draws = [Draw(0.2, 0, 1.0, 0.0, 0, 0, position) for position in range(rows)]
        chunks = [Chunk(branch, self._context, self._context + rows, draws)]
        seconds, _ = timed(lambda: self._runner.forward(chunks).sample(chunks))
        cache.release(branch)
        return seconds

    def by_rows(self) -> LatencyModel:
        """Return the mean seconds by rows; the numbers of rows take turns."""
        measured = [[self.seconds(rows) for rows in ROWS] for _ in range(_ROUNDS)]
        seconds = [fmean(times) for times in zip(*measured, strict=True)]
        return LatencyModel(ROWS, tuple(max(seconds[: i + 1]) for i in range(len(ROWS))))

    def repeated(self, rows: int, done: Callable[[], bool]) -> float:
        """Return the mean seconds of forwards that are repeated until `done`."""
        times = [self.seconds(rows)]
        while not done():
            times.append(self.seconds(rows))
        return fmean(times)


def measure(engine: Engine, drafter: Drafter, context: int = 400) -> Machine:
    """Measure the forwards of a target and its draft model after `context` tokens. Takes about ten seconds.

    A drafter without a model of its own gives the seconds itself, and is taken to slow nothing down.
    """
    verifying = engine.call(partial(_Probe, engine.runner, context))
    target = engine.call(verifying.by_rows)
    if drafter.runner is None:
        return Machine(target, drafter.latency(context) or LatencyModel((1,), (0.0,)))
    drafting = engine.call(partial(_Probe, drafter.runner, context))
    alone = engine.call(drafting.by_rows)
    with draft_worker() as worker:
        apart = worker.submit(drafting.repeated, 1, _after(_SECONDS)).result()
        ended = threading.Event()
        future = worker.submit(drafting.repeated, 1, ended.is_set)
        verified = engine.call(partial(verifying.repeated, _CHAIN, _after(_SECONDS)))
        ended.set()
        beside = future.result()
    return Machine(target, alone, apart / alone.of(1), beside / alone.of(1), verified / target.of(_CHAIN))


def _after(seconds: float) -> Callable[[], bool]:
    end = time.monotonic() + seconds
    return lambda: time.monotonic() > end


def forwards_table(machine: Machine) -> Table:
    """Build a table of a machine's forwards in milliseconds."""
    table = Table("ms", *(f"{rows} rows" for rows in ROWS), "beside the other", title="forwards, alone")
    models = (("target", machine.target, machine.verify_beside), ("draft", machine.draft, machine.draft_beside))
    for name, model, times in models:
        table.add_row(name, *(f"{1000 * model.of(rows):.1f}" for rows in ROWS), f"{times:.2f}x")
    return table
