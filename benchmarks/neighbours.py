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
from functools import partial

from pydantic import Field
from rich.console import Console

from benchmarks.branches import Branches, decoded, mixed_ids
from benchmarks.harness import Bench, Measured, SideError
from benchmarks.peers import LLAMA, OURS, BranchesOptions, Counts, Run, decode, open_llama, open_ours
from tot.decoders.machine import describe

BUSY = "beside a busy core"
_LOOP = """
import os, sys
print("busy", flush=True)
while os.getppid() == int(sys.argv[1]):
    for _ in range(10**6):
        pass
"""
"""The busy program. It ends with this process, however that ends."""


class Options(BranchesOptions):
    """Measure how much a program that keeps one core busy slows down decoding, ours and llama.cpp's."""

    branches: Counts = Field((1, 5, 15), description="Comma-separated numbers of samples of one prompt.")


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


def _disturbed(side: Run, work: Branches) -> Measured:
    with busy_core():
        return side(work)


def run(asked: Options, console: Console) -> None:
    """Run the benchmark and print the table. Raises ModelError if our own side cannot load."""
    say = partial(console.print, style="dim")
    with ExitStack() as stack:
        decoder = open_ours(asked.model, stack, say)
        sides: dict[str, Run] = {OURS: partial(decoded, decoder)}
        try:
            sides[LLAMA] = open_llama(asked, stack).run
        except SideError as error:
            say(f"{LLAMA} is left out: {error}")
        pairs = [(f"{name}, {BUSY}", name) for name in sides]
        sides |= {busy: partial(_disturbed, sides[name]) for busy, name in pairs}
        bench = Bench(asked, console, describe(decoder.engine.loaded.device, decoder.engine.loaded.dtype))
        decode(asked, bench, sides, mixed_ids(decoder.tokenizer, asked.prompt_tokens), lambda cells: pairs)
