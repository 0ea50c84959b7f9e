"""The benchmark `peers`: compare our decoder with transformers, llama.cpp and vLLM on branches and whole searches.

All sides use the same weights, prompts and numbers of new tokens. Rates include prefill, then prefill and decoding
follow apart. Peers that are not installed are left out. A failing side is reported, and the others continue. No side
drafts tokens. The part `limit` compares a step's time with the limit of memory bandwidth and arithmetic.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from statistics import median
from typing import Any

import psutil
from rich.console import Console

from benchmarks.engines import resident
from benchmarks.harness import (
    NOT_AT_ALL,
    RATE,
    SECONDS,
    Bench,
    Measured,
    Measurements,
    Metric,
    Side,
    by_column,
    percent,
    plain,
    timed,
)
from benchmarks.options import PeersOptions
from benchmarks.peers.sides import LLAMA, OURS, Peer, open_sides
from benchmarks.roofline import Demand, limit, matrix_rate, read_bandwidth
from benchmarks.workloads import (
    Waves,
    branches,
    mixed_ids,
    questions,
    record,
    rotated,
    rows,
)
from tot.decoders.decoder import LocalDecoder
from tot.decoders.engine.engine import Engine
from tot.decoders.machine import describe
from tot.decoders.request import Request, Sampling
from tot.decoders.timeline import Timeline
from tot.registry import load_task
from tot.task.task import Task

THOUGHTS, BREADTH, DEPTH = (3, 5), 3, 4
STEPS = 64
STEP_COUNTS = (1, 4, 8, 15, 32)
_PREFILL = Metric("prefill tokens/s", lambda measured: measured.get("prefilled"))
_DECODING = Metric("decoding tokens/s", lambda measured: measured.get("decoded"))
_HELD = Metric(
    "GiB resident", lambda measured: measured["resident"] / 2**30 if "resident" in measured else None, plain(".2f")
)
BUSY = 20.0
"""CPU usage in percent of all processors above which the machine counts as busy."""
_WARM_UP_TOKENS, _WARM_UP_WAVES = 8, 3
_WARM_UP_PLACE, _LIMIT_PLACE = 500, 700
"""Rotations of the prompt in warm-ups and in the step measurement; rounds use smaller ones."""


@dataclass
class Peers:
    """The state that all parts share."""

    asked: PeersOptions
    bench: Bench
    sides: Sequence[Peer]
    task: Task
    decoded: Measurements | None = None

    @property
    def ours(self) -> LocalDecoder:
        assert self.sides[0].decoder is not None
        return self.sides[0].decoder

    @property
    def prompt(self) -> list[int]:
        return mixed_ids(self.ours.tokenizer, self.asked.prompt_tokens)

    def compare(self, title: str, sides: Sequence[Side], asking: Any, **options: Any) -> Measurements:
        """Compare sides with the option `patience`, leaving out sides that fail."""
        options = {"patience": self.asked.patience, "failing": True, **options}
        return self.bench.compare(title, sides, asking, **options)


def run(asked: PeersOptions, console: Console) -> None:
    """Run the benchmark and print the tables.

    Raises OptionError for a file without questions and ModelError if our own side cannot load.
    """
    task = load_task("gsm8k")
    questions(task, asked.data, 1)
    with ExitStack() as stack:
        sides = open_sides(asked, stack, partial(console.print, style="dim"))
        assert sides[0].decoder is not None
        loaded = sides[0].decoder.engine.loaded
        bench = Bench(asked, console, describe(loaded.device, loaded.dtype))
        bench.keep(sides={side.name: side.about for side in sides})
        peers = Peers(asked, bench, sides, task)
        for name, measure in PARTS.items():
            if name in asked.parts:
                measure(peers)
        bench.show(
            f"Medians (and ranges) of rounds. Cells predicted to take more than {asked.patience:g} s ran once; cells "
            f"predicted to take more than {NOT_AT_ALL * asked.patience:g} s were skipped."
        )


def settled(side: Side) -> Side:
    """Make a side wait until the machine is idle, at most 5 seconds.

    Other sides may stay busy after their reply; some servers poll for a second.
    """

    def run(asked: Any) -> Measured:
        end = time.monotonic() + 5
        while psutil.cpu_percent(interval=0.25) > BUSY and time.monotonic() < end:
            pass
        return side.run(asked)

    return replace(side, run=run)


def decode(peers: Peers) -> None:
    """Decode branches of a prompt; every cell has a new one."""
    asked, ids = peers.asked, peers.prompt
    places = {count: i for i, count in enumerate(asked.branches)}

    def asking(count: int, turn: int) -> Waves:
        return branches(rotated(ids, turn * len(places) + places[count] + 1), count, asked.new_tokens)

    def warming(count: int) -> Waves:
        return branches(rotated(ids, _WARM_UP_PLACE + places[count]), count, min(_WARM_UP_TOKENS, asked.new_tokens))

    def run(side: Peer, waves: Waves) -> Measured:
        """Run a side. Add the rates of prefill and decoding, and the memory if our side is alone in this process."""
        measured = side.run(waves) if side.decoder is None else _with_prefill(side, side.decoder.engine, waves)
        if prefill := measured.get("prefill"):
            (request,) = waves[0]
            measured["prefilled"] = len(request.prompt) / prefill
            if asked.new_tokens > 1:
                measured["decoded"] = (measured["tokens"] - len(request.new)) / (measured["seconds"] - prefill)
        alone = side.decoder is not None and set(asked.sides) <= {"llama", "vllm"}
        return measured | {"resident": resident()} if alone else measured

    others = [_PREFILL, _DECODING, _HELD]
    title = f"{asked.model}: new tokens/s, {asked.new_tokens} each after {len(ids)} tokens, by branches"
    peers.decoded = peers.compare(
        title,
        [settled(Side(side.name, partial(run, side), most=side.most)) for side in peers.sides],
        asking,
        columns=asked.branches,
        rounds=asked.rounds,
        warm_up=warming,
        size=rows,
        table=lambda results: by_column(results, RATE, title, ratios=_pairs(results), others=others),
    )


def _with_prefill(side: Peer, engine: Engine, waves: Waves) -> Measured:
    """Run one of our sides on a request. Add the seconds to the first token of each sample, all of equal length."""
    engine.timeline = timeline = Timeline()
    measured = side.run(waves)
    engine.timeline = None
    steps = [span.ended for span in timeline.spans if span.kind == "sampling"]
    return measured | {"prefill": steps[-waves[0][0].new[0]] - timeline.spans[0].began}


def _pairs(results: Measurements) -> list[tuple[str, str]]:
    """Pair our side with all others, and our quantized sides with our side."""
    others = [name for name in results.sides if name != OURS]
    return [(name, OURS) if name.startswith(OURS) else (OURS, name) for name in others]


def tree(peers: Peers) -> None:
    """Search one problem per round, and replay its requests on every side.

    The other sides sample one token per evaluation; ours scores all choices.
    """
    problems = questions(peers.task, peers.asked.data, peers.asked.problems)
    search_options = {"breadth": BREADTH, "depth": DEPTH}
    searching_sides = [side for side in peers.sides if side.searches]
    llamas = [side.name for side in searching_sides if side.name.startswith(LLAMA)]
    best = _fastest(llamas, peers.decoded)
    sides = [settled(side) for side in searching_sides if side.name not in llamas or side.name == best]
    warm_up_waves = record(peers.ours, peers.task, problems[-1], min(THOUGHTS), **search_options)[:_WARM_UP_WAVES]
    title = f"seconds a GSM8K search, T = {DEPTH}, b = {BREADTH}, {len(problems)} problems"
    peers.compare(
        title,
        sides,
        lambda thoughts, turn: record(peers.ours, peers.task, problems[turn], thoughts, **search_options),
        columns=THOUGHTS,
        rounds=len(problems),
        warm_up=lambda _: warm_up_waves,
        size=rows,
        table=lambda results: by_column(results, SECONDS, title, head="n = ", ratios=_pairs(results)),
    )


def _fastest(names: Sequence[str], decoded: Measurements | None) -> str | None:
    """Return the llama.cpp precision that decoded fastest at the largest number of branches."""
    for column in reversed(decoded.columns if decoded else ()):
        rates = {name: values for name in names if decoded and (values := decoded.values(RATE, name, column))}
        if rates:
            return max(rates, key=lambda name: median(rates[name]))
    return names[0] if names else None


def step_seconds(decoder: LocalDecoder, prompt: Sequence[int], count: int) -> float:
    """Return the seconds per step that decodes `count` branches, without prefill."""
    decoder.engine.call(decoder.engine.cache.clear)
    seconds = []
    for new in (1, 1, 1 + STEPS):  # the first one prefills the prompt
        sampling = Sampling(max_tokens=new, temperature=1.0, n=count, ignore_eos=True)
        seconds.append(timed(lambda: decoder.generate([Request(prompt=tuple(prompt), sampling=sampling)]))[0])  # noqa: B023
    return (seconds[2] - seconds[1]) / STEPS


def steps(peers: Peers) -> None:
    """Measure a step's time and compare it with the limit of memory bandwidth and arithmetic.

    The share of the limit is reported for unquantized weights only.
    """
    loaded, ids = peers.ours.engine.loaded, peers.prompt
    demand = Demand.of(loaded, peers.ours.engine.runner.backend.weight_bytes)
    peers.bench.say("bandwidth, matrix products …")
    bandwidth = read_bandwidth(loaded.device, demand.weight_bytes)
    rate = matrix_rate(loaded.dtype.name, loaded.device)

    def step(decoder: LocalDecoder, work: tuple[int, list[int]]) -> Measured:
        count, prompt = work
        operations = demand.operations(count, len(prompt) + STEPS // 2)
        shortest = limit(demand.weight_bytes, operations, bandwidth, rate)
        return {"seconds": step_seconds(decoder, prompt, count), "least": shortest if decoder is peers.ours else None}

    milliseconds = Metric("ms", lambda measured: 1000 * measured["seconds"], less=True)
    limit_share = Metric(
        "of the limit", lambda measured: measured["least"] and measured["least"] / measured["seconds"], percent
    )
    title = "milliseconds of a step, by branches"
    peers.compare(
        title,
        [Side(side.name, partial(step, side.decoder)) for side in peers.sides if side.decoder is not None],
        lambda count, turn: (count, rotated(ids, _LIMIT_PLACE + turn)),
        columns=[count for count in STEP_COUNTS if count <= max(peers.asked.branches)],
        rounds=peers.asked.rounds,
        table=lambda results: by_column(results, milliseconds, title, ratios=_pairs(results), others=[limit_share]),
    )
    size = f"{demand.weight_bytes / 1e6:.0f} MB of weights"
    peers.bench.show(f"Limit: {size}, read at {bandwidth / 1e9:.1f} GB/s; {rate / 1e9:.0f} GFLOP/s.")


PARTS: dict[str, Callable[[Peers], None]] = {
    "decode": decode,
    "limit": steps,
    "tree": tree,
}
