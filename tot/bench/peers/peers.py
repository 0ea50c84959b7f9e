"""`tot bench peers`: our decoder beside transformers, llama.cpp and vLLM: branches of a prompt, and whole searches.

Same weights, same prompts, same numbers of new tokens, prefill counted on all sides. Peers that are not installed are
left out; what a side fails at is told, and the others go on. Besides: how much of what memory and arithmetic allow a
step makes use of.
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

from tot.bench.engines import resident
from tot.bench.harness import (
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
from tot.bench.options import PeersOptions
from tot.bench.peers.sides import LLAMA, OURS, Peer, open_sides
from tot.bench.workloads import (
    Waves,
    branches,
    mixed_ids,
    new_tokens,
    questions,
    record,
    rotated,
    rows,
)
from tot.decoders.decoder import LocalDecoder
from tot.decoders.machine import describe, limit, matrix_rate, read_bandwidth
from tot.decoders.request import Request, Sampling
from tot.decoders.timeline import Load
from tot.registry import load_task
from tot.report.profile import Demand
from tot.task.task import Task

THOUGHTS, BREADTH, DEPTH = (3, 5), 3, 4
STEPS = 64
STEP_COUNTS = (1, 4, 8, 15, 32)
_HELD = Metric("GiB resident", lambda took: took["resident"] / 2**30 if "resident" in took else None, plain(".2f"))
BUSY = 20.0
"""Percent of all processors, above which somebody is at work."""
_WARM_UP_TOKENS, _WARM_UP_WAVES = 8, 3
_WARM_UP_PLACE, _LIMIT_PLACE = 500, 700
"""Prompts are rotated by less in the rounds, and by more in warm-ups and where steps are measured."""


@dataclass
class Peers:
    """What all parts measure with."""

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
        """With what takes too long done once or left out, and sides that fail left out."""
        options = {"patience": self.asked.patience, "failing": True, **options}
        return self.bench.compare(title, sides, asking, **options)


def run(asked: PeersOptions, console: Console) -> None:
    """Measure, and print the tables. Raises OptionError for a file without questions, ModelError where our own side
    can't load."""
    task = load_task("gsm8k")
    questions(task, asked.data, 1)
    with ExitStack() as stack:
        sides = open_sides(asked, stack, partial(console.print, style="dim"))
        assert sides[0].decoder is not None
        loaded = sides[0].decoder.engine.loaded
        bench = stack.enter_context(Bench(asked, console, describe(loaded.device, loaded.dtype)))
        bench.keep(sides={side.name: side.about for side in sides})
        peers = Peers(asked, bench, sides, task)
        for name, measure in PARTS.items():
            if name in asked.parts:
                measure(peers)
        bench.show(
            f"Medians (and ranges) of rounds; what was predicted to take more than {asked.patience:g} s was done once, "
            f"and nothing that was predicted to take more than {NOT_AT_ALL * asked.patience:g} s."
        )


def settled(side: Side) -> Side:
    """What another side still does after its answer (some servers poll for a second) is not to slow this one: it begins
    when the machine is quiet, or after 5 seconds."""

    def run(asked: Any) -> Measured:
        end = time.monotonic() + 5
        while psutil.cpu_percent(interval=0.25) > BUSY and time.monotonic() < end:
            pass
        return side.run(asked)

    return replace(side, run=run)


def decode(peers: Peers) -> None:
    """Branches of a prompt that no one has seen, another one in every cell."""
    asked, ids = peers.asked, peers.prompt
    places = {count: i for i, count in enumerate(asked.branches)}

    def asking(count: int, turn: int) -> Waves:
        return branches(rotated(ids, turn * len(places) + places[count] + 1), count, asked.new_tokens)

    def warming(count: int) -> Waves:
        return branches(rotated(ids, _WARM_UP_PLACE + places[count]), count, min(_WARM_UP_TOKENS, asked.new_tokens))

    def run(side: Peer, given: Waves) -> Measured:
        """With the memory that our own process holds afterwards, where there is no other side in it."""
        took = side.run(given)
        alone = side.decoder is not None and set(asked.sides) <= {"llama", "vllm"}
        return took | {"resident": resident()} if alone else took

    title = f"{asked.model}: new tokens/s, {asked.new_tokens} each after {len(ids)} tokens, by branches"
    peers.decoded = peers.compare(
        title,
        [settled(Side(side.name, partial(run, side), most=side.most)) for side in peers.sides],
        asking,
        columns=asked.branches,
        rounds=asked.rounds,
        warm_up=warming,
        size=rows,
        table=lambda results: by_column(results, RATE, title, ratios=_pairs(results), others=[_HELD]),
    )


def _pairs(results: Measurements) -> list[tuple[str, str]]:
    """Ours against all others, and our own eight bits against it."""
    others = [name for name in results.sides if name != OURS]
    return [(name, OURS) if name.startswith(OURS) else (OURS, name) for name in others]


def tree(peers: Peers) -> None:
    """A problem a round: searched here by `solve()`, and what that asked asked again of every side. The others read one
    token for an evaluation, where ours scores all choices."""
    asked = questions(peers.task, peers.asked.data, peers.asked.problems)
    searched = {"breadth": BREADTH, "depth": DEPTH}
    able = [side for side in peers.sides if side.searches]
    llamas = [side.name for side in able if side.name.startswith(LLAMA)]
    best = _fastest(llamas, peers.decoded)
    sides = [
        settled(Side(side.name, lambda given, side=side: side.run(given[0])))  # type: ignore[misc]
        for side in able
        if side.name not in llamas or side.name == best
    ]
    recorded = Side("(solve() with tot)", lambda given: {"seconds": given[1], "tokens": new_tokens(given[0])})
    short = record(peers.ours, peers.task, asked[-1], min(THOUGHTS), **searched)[0][:_WARM_UP_WAVES]
    title = f"seconds a GSM8K search, T = {DEPTH}, b = {BREADTH}, {len(asked)} problems"
    peers.compare(
        title,
        [*sides, recorded],
        lambda thoughts, turn: record(peers.ours, peers.task, asked[turn], thoughts, **searched),
        columns=THOUGHTS,
        rounds=len(asked),
        warm_up=lambda _: (short, 0.0),
        size=lambda given: rows(given[0]),
        table=lambda results: by_column(results, SECONDS, title, head="n = ", ratios=_pairs(results)[: len(sides) - 1]),
    )


def _fastest(names: Sequence[str], decoded: Measurements | None) -> str | None:
    """Of llama.cpp's precisions, the one that decoded fastest at most branches."""
    for column in reversed(decoded.columns if decoded else ()):
        rates = {name: values for name in names if decoded and (values := decoded.values(RATE, name, column))}
        if rates:
            return max(rates, key=lambda name: median(rates[name]))
    return names[0] if names else None


def step_seconds(decoder: LocalDecoder, prompt: Sequence[int], count: int) -> float:
    """Seconds of a step that decodes `count` branches and nothing else."""
    decoder.engine.call(decoder.engine.cache.clear)
    taken = []
    for new in (1, 1, 1 + STEPS):  # the first computes the prompt
        sampling = Sampling(max_tokens=new, temperature=1.0, n=count, ignore_eos=True)
        taken.append(timed(lambda: decoder.generate([Request(prompt=tuple(prompt), sampling=sampling)]))[0])  # noqa: B023
    return (taken[2] - taken[1]) / STEPS


def steps(peers: Peers) -> None:
    """How long a step takes of ours, and beside it what memory and arithmetic allow: how much of that it makes use of,
    where weights are as they were."""
    loaded, demand, ids = peers.ours.engine.loaded, Demand.of(peers.ours.engine), peers.prompt
    peers.bench.say("bandwidth, matrix products …")
    bandwidth = read_bandwidth(loaded.device, demand.weight_bytes)
    rate = matrix_rate(loaded.dtype, loaded.device)

    def step(decoder: LocalDecoder, given: tuple[int, list[int]]) -> Measured:
        count, prompt = given
        context = len(prompt) + STEPS // 2
        load = Load({("generate", "decode"): count}, count, count * context, context)
        operations = demand.operations(load)
        least = limit(demand.weight_bytes, operations, bandwidth, rate)
        return {"seconds": step_seconds(decoder, prompt, count), "least": least if decoder is peers.ours else None}

    milliseconds = Metric("ms", lambda took: 1000 * took["seconds"], less=True)
    used = Metric("of the limit", lambda took: took["least"] and took["least"] / took["seconds"], percent)
    title = "milliseconds of a step, by branches"
    peers.compare(
        title,
        [Side(side.name, partial(step, side.decoder)) for side in peers.sides if side.decoder is not None],
        lambda count, turn: (count, rotated(ids, _LIMIT_PLACE + turn)),
        columns=[count for count in STEP_COUNTS if count <= max(peers.asked.branches)],
        rounds=peers.asked.rounds,
        table=lambda results: by_column(results, milliseconds, title, ratios=_pairs(results), others=[used]),
    )
    size = f"{demand.weight_bytes / 1e6:.0f} MB of weights"
    peers.bench.show(f"Limit: {size}, read at {bandwidth / 1e9:.1f} GB/s; {rate / 1e9:.0f} GFLOP/s.")


PARTS: dict[str, Callable[[Peers], None]] = {
    "decode": decode,
    "limit": steps,
    "tree": tree,
}
