"""Measure the forwards of target and draft alone and beside each other, and simulate SEED's schedule with them.

The benchmark `schedule` shows where the paper's claims hold: on this machine, on machines whose draft and target do not
slow each other down, and on devices on which further rows cost nothing.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from functools import partial
from random import Random
from statistics import fmean

from rich.console import Console
from rich.table import Table

from benchmarks.engines import about
from benchmarks.harness import Bench
from benchmarks.options import ScheduleOptions
from benchmarks.schedule import Machine, Schedule, Wave, simulate
from tot.decoders.decoder import load_decoder
from tot.decoders.drafting.drafters import Drafter
from tot.decoders.drafting.latency_model import ROWS, LatencyModel
from tot.decoders.engine.engine import Engine
from tot.decoders.engine.runner import Chunk, Runner
from tot.decoders.engine.sampling import Draw
from tot.decoders.errors import OptionError
from tot.decoders.methods.seed import draft_worker

_ROUNDS = 15
_SECONDS = 2.0
"""Time of each measurement of forwards that run beside others."""
_CHAIN = 4
"""Rows of a verification beside a draft."""
_LENGTH, _WAVES = 100, 20
"""New tokens of a simulated text, and number of simulated waves."""
_RATIOS = ("rounds, of serial sd", "rounds, of packed seed", "packed seed, of packed ar")


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
        began = time.perf_counter()
        self._runner.forward(chunks).sample(chunks)
        seconds = time.perf_counter() - began
        cache.release(branch)
        return seconds

    def by_rows(self) -> LatencyModel:
        """Return the mean seconds by rows; the numbers of rows take turns."""
        measured = [[self.seconds(rows) for rows in ROWS] for _ in range(_ROUNDS)]
        seconds = [fmean(times) for times in zip(*measured, strict=True)]
        return LatencyModel(ROWS, tuple(max(seconds[: i + 1]) for i in range(len(ROWS))))

    def again(self, rows: int, done: Callable[[], bool]) -> float:
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
        apart = worker.submit(drafting.again, 1, _after(_SECONDS)).result()
        ended = threading.Event()
        future = worker.submit(drafting.again, 1, ended.is_set)
        verified = engine.call(partial(verifying.again, _CHAIN, _after(_SECONDS)))
        ended.set()
        beside = future.result()
    return Machine(target, alone, apart / alone.of(1), beside / alone.of(1), verified / target.of(_CHAIN))


def _after(seconds: float) -> Callable[[], bool]:
    end = time.monotonic() + seconds
    return lambda: time.monotonic() > end


def costs_table(machine: Machine) -> Table:
    """Build a table of a machine's forwards in milliseconds."""
    table = Table("ms", *(f"{rows} rows" for rows in ROWS), "beside the other", title="forwards, alone")
    for name, model, times in (
        ("target", machine.target, machine.verify_beside),
        ("draft", machine.draft, machine.draft_beside),
    ):
        table.add_row(name, *(f"{1000 * model.of(rows):.1f}" for rows in ROWS), f"{times:.2f}x")
    return table


def machines(measured: Machine, texts: int) -> Mapping[str, Machine]:
    """Return the measured machine, and machines that lack its limits one after another."""
    apart = replace(measured, worker=1.0, draft_beside=1.0, verify_beside=1.0)
    flat = replace(apart, target=LatencyModel((1,), (measured.target.of(1),)))
    return {
        "this machine": measured,
        "a device for the draft": apart,
        "a device for the draft, rows cost nothing": flat,
        "a draft device per text, rows cost nothing": replace(flat, devices=texts),
    }


def ratios(machine: Machine, share: float, texts: int, k: int, chance: float) -> Iterator[float]:
    """Yield the simulated speeds that `_RATIOS` names. `share`: a draft's forward relative to the target's."""
    machine = replace(machine, draft=_scaled(machine.target, share))
    waves, chain = [Wave([_LENGTH] * texts)] * _WAVES, (1,) * k

    def seconds(schedule: Schedule) -> float:
        return simulate(schedule, waves, machine, chance)

    rounds, packed = seconds(Schedule("rounds", chain)), seconds(Schedule("packed", chain, adapt=True))
    yield seconds(Schedule("serial", chain)) / rounds
    yield packed / rounds
    yield seconds(Schedule("packed")) / packed


def _scaled(model: LatencyModel, by: float) -> LatencyModel:
    return LatencyModel(model.rows, tuple(by * seconds for seconds in model.seconds))


def _map(asked: ScheduleOptions, name: str, measured: Machine, shares: Sequence[float]) -> Table:
    table = Table("draft", "speed of", *(f"n = {texts}" for texts in asked.texts), title=name)
    for share in shares:
        columns = [
            ratios(machines(measured, texts)[name], share, texts, asked.k, asked.acceptance) for texts in asked.texts
        ]
        for ratio, values in zip(_RATIOS, zip(*columns, strict=True), strict=True):
            table.add_row(f"{share:.2f}" * (ratio == _RATIOS[0]), ratio, *(f"{value:.2f}x" for value in values))
    return table


def run(asked: ScheduleOptions, console: Console) -> None:
    """Measure the forwards, and print the simulated speeds. It takes about a minute."""
    with ExitStack() as stack:
        decoder = stack.enter_context(load_decoder("sd", asked.model, draft=asked.draft, **asked.computed))
        assert decoder.drafter is not None
        if decoder.drafter.latency(0) is None:
            raise OptionError(f"the draft {asked.draft!r} is no model: give one whose forwards can be measured")
        description = f"{asked.model}, drafts by {asked.draft}; {about(decoder.engine)}"
        bench = Bench(asked, console, description)
        measured = measure(decoder.engine, decoder.drafter)
        bench.keep(forwards=asdict(measured))
        share = measured.draft.of(1) / measured.target.of(1)
        maps = [_map(asked, name, measured, [share, *asked.shares]) for name in machines(measured, 1)]
        bench.show(costs_table(measured), *maps)
