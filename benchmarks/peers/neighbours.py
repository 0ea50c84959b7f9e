"""The benchmark `neighbours`: decode beside a program that keeps one core busy, and on an idle machine.

Our decoder and llama.cpp get the same weights, prompts and numbers of new tokens. Each side runs with and without the
busy program in turns, so that the ratio is of one run.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

from rich.console import Console

from benchmarks.engines import SideError
from benchmarks.harness import RATE, Bench, Measured, Side, by_column
from benchmarks.options import NeighboursOptions
from benchmarks.peers.peers import settled
from benchmarks.peers.sides import LLAMA, OURS, Peer, open_llama, open_ours
from benchmarks.workloads import branches, mixed_ids, rotated, rows
from tot.decoders.machine import describe

BUSY = "beside a busy core"
_WARM_UP_TOKENS, _WARM_UP_PLACE = 8, 500
_LOOP = """
import os, sys
print("busy", flush=True)
while os.getppid() == int(sys.argv[1]):
    for _ in range(10**6):
        pass
"""
"""The busy program. It ends with this process, however that ends."""


@contextmanager
def busy_core() -> Iterator[None]:
    """Keep one core busy with another process."""
    with subprocess.Popen([sys.executable, "-c", _LOOP, str(os.getpid())], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        try:
            yield
        finally:
            process.kill()


def disturbed(side: Side) -> Side:
    """Return a side that does the same work beside a busy core."""

    def run(work: Any) -> Measured:
        with busy_core():
            return side.run(work)

    return replace(side, name=f"{side.name}, {BUSY}", run=run)


def run(asked: NeighboursOptions, console: Console) -> None:
    """Run the benchmark and print the table. Raises ModelError if our own side cannot load."""
    with ExitStack() as stack:
        ours = open_ours(asked.model, stack, True, OURS)
        decoder = ours.decoder
        assert decoder is not None
        peers = [ours, *_llama(asked, stack, console)]
        loaded, tokenizer = decoder.engine.loaded, decoder.tokenizer
        bench = Bench(asked, console, describe(loaded.device, loaded.dtype))
        bench.keep(sides={side.name: side.about for side in peers})
        sides = [turn for side in peers for turn in (settled(side), settled(disturbed(side)))]
        pairs = [(f"{side.name}, {BUSY}", side.name) for side in peers]
        ids = mixed_ids(tokenizer, asked.prompt_tokens)
        title = f"{asked.model}: new tokens/s, {asked.new_tokens} each after {len(ids)} tokens, by branches"
        bench.compare(
            title,
            sides,
            lambda count, turn: branches(rotated(ids, 100 * turn + count), count, asked.new_tokens),
            columns=asked.branches,
            rounds=asked.rounds,
            warm_up=lambda count: branches(rotated(ids, _WARM_UP_PLACE + count), count, _WARM_UP_TOKENS),
            size=rows,
            failing=True,
            table=lambda results: by_column(results, RATE, title, ratios=pairs),
        )


def _llama(asked: NeighboursOptions, stack: ExitStack, console: Console) -> list[Peer]:
    """Return llama.cpp's side with the precision of the model's file; [] if it is not installed."""
    try:
        return [open_llama(asked, stack, LLAMA)]
    except SideError as error:
        console.print(f"{LLAMA} is left out: {error}", style="dim")
        return []
