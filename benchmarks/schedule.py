"""The benchmark `schedule`: where SEED's schedules are faster, simulated with the measured forwards.

The machines are this one, one whose draft and target do not slow each other down, and ones on which further rows cost
nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace

from pydantic import Field, PositiveFloat
from rich.console import Console
from rich.table import Table

from benchmarks.engines import about
from benchmarks.forwards import forwards_table, measure
from benchmarks.harness import Bench, BenchOptions
from benchmarks.peers import Counts
from benchmarks.simulation import Machine, Schedule, Wave, simulate
from tot.decoders.decoder import load_decoder
from tot.decoders.drafting.latency_model import LatencyModel
from tot.decoders.errors import OptionError

_LENGTH, _WAVES, _CHAIN = 100, 20, (1, 1, 1)
"""New tokens of a simulated text, number of simulated waves, and drafted tokens."""


class Options(BenchOptions):
    """Measure forwards of a target and a draft model, and simulate where SEED's schedules are faster."""

    draft: str = Field(description="Draft model, as for the decoder option draft of tot solve.")
    acceptance: float = Field(0.8, ge=0, le=1, description="Share of drafted tokens that are accepted.")
    texts: Counts = Field((1, 3, 8, 32), description="Comma-separated numbers of texts that are decoded together.")
    shares: tuple[PositiveFloat, ...] = Field(
        (0.33, 0.1, 0.03), description="Comma-separated costs of a draft's forward, as shares of the target's."
    )


def run(asked: Options, console: Console) -> None:
    """Measure the forwards, and print the simulated speeds. It takes about a minute."""
    with ExitStack() as stack:
        decoder = stack.enter_context(load_decoder("sd", asked.model, draft=asked.draft, prefix_cache=False))
        assert decoder.drafter is not None
        if decoder.drafter.latency(0) is None:
            raise OptionError(f"the draft {asked.draft!r} is no model: give one whose forwards can be measured")
        bench = Bench(asked, console, f"{asked.model}, drafts by {asked.draft}; {about(decoder.engine)}")
        measured = measure(decoder.engine, decoder.drafter)
        bench.keep(forwards=asdict(measured))
        bench.show(forwards_table(measured))
        for name in machines(measured, 1):
            bench.show(_speeds(asked, name, measured))


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


def ratios(machine: Machine, share: float, texts: int, chance: float) -> Mapping[str, float]:
    """Return the simulated speeds. `share`: seconds of a draft's forward relative to the target's."""
    draft = LatencyModel(machine.target.rows, tuple(share * seconds for seconds in machine.target.seconds))
    waves = [Wave([_LENGTH] * texts)] * _WAVES

    def seconds(kind: str, k_config: Sequence[int] = (), adapt: bool = False) -> float:
        schedule = Schedule(kind, tuple(k_config), adapt)
        return simulate(schedule, waves, replace(machine, draft=draft), chance)

    rounds, packed = seconds("rounds", _CHAIN), seconds("packed", _CHAIN, adapt=True)
    return {
        "rounds, of serial sd": seconds("serial", _CHAIN) / rounds,
        "rounds, of packed seed": packed / rounds,
        "packed seed, of packed ar": seconds("packed") / packed,
    }


def _speeds(asked: Options, name: str, measured: Machine) -> Table:
    table = Table("draft", "speed of", *(f"n = {texts}" for texts in asked.texts), title=name)
    for share in (measured.draft.of(1) / measured.target.of(1), *asked.shares):
        columns = [ratios(machines(measured, n)[name], share, n, asked.acceptance) for n in asked.texts]
        for i, ratio in enumerate(columns[0]):
            table.add_row(f"{share:.2f}" * (i == 0), ratio, *(f"{column[ratio]:.2f}x" for column in columns))
    return table
