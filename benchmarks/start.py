"""The benchmark `start`: seconds from a command to its first token, ours and llama.cpp's, each in a new process.

Ours is `tot solve --search cot --max-tokens 1`, until it prints the answer. llama.cpp's is a Python process with
llama-cpp-python, until it replies with one token sampled after a prompt of the same length. In the part
"cold", our cache folder is empty: kernels are compiled if the installation has none, and weights are packed.
llama.cpp keeps no cache. Files stay in the system's page cache.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory, TemporaryFile
from typing import Literal

from pydantic import Field
from rich.console import Console

from benchmarks.branches import Branches
from benchmarks.harness import Bench, BenchOptions, Measured, Metric, by_column, spread, timed
from benchmarks.peer_process import LLAMA_PYTHON, LlamaPython, llama_process
from benchmarks.peers import LLAMA, OURS
from tot.decoders.errors import OptionError
from tot.decoders.machine import describe
from tot.decoders.models.model_names import find_model

_SECONDS = Metric("seconds", lambda cell: cell["seconds"], partial(spread, form=".2f"), less=True)
_ENDED = Metric("to the end of its process", lambda cell: cell.get("ended"), _SECONDS.show, less=True)


class Options(BenchOptions):
    """Compare the time from a command to its first token with llama.cpp's, with an empty and a full cache folder."""

    parts: tuple[Literal["cold", "warm"], ...] = Field(
        ("cold", "warm"), description="Comma-separated: cold (empty cache folder), warm (second run)."
    )
    rounds: int = Field(3, ge=1, description="Rounds. The sides take turns in each; medians are compared.")
    llama: LlamaPython = LLAMA_PYTHON


def run(asked: Options, console: Console) -> None:
    """Run the benchmark and print its table. Raises OptionError if our command fails."""
    bench = Bench(asked, console, describe("cpu"))
    with TemporaryDirectory(prefix="tot-start-") as kept:
        bench.say("our first run, unmeasured …")
        prompt_tokens = start_ours(asked.model, kept, "warm")["prompt_tokens"]
        sides: dict[str, Callable[[str], Measured]] = {OURS: partial(start_ours, asked.model, kept)}
        if find_model(asked.model).suffix == ".gguf" and asked.llama.exists():
            sides[LLAMA] = lambda part: start_llama(asked.llama, asked.model, prompt_tokens)
        else:
            bench.say(f"{LLAMA} is left out: give a .gguf file as --model, and run `make peers`")
        title = f"{asked.model}: seconds to the first token after {prompt_tokens} tokens"
        pairs = [(OURS, LLAMA)] if LLAMA in sides else ()
        bench.compare(
            title,
            sides,
            lambda part, turn: part,
            lambda cells: by_column(cells, [_SECONDS, _ENDED], title, pairs),
            columns=asked.parts,
            rounds=asked.rounds,
        )


def start_ours(model: str, kept: str, part: str) -> Measured:
    """Run our command once with the cache folder `kept`, or in the part "cold" with a new one."""
    command = [sys.executable, "-m", "tot", "solve", "gsm8k", "--model", model]
    command += ["--search", "cot", "--max-tokens", "1", "--json"]
    with TemporaryDirectory(prefix="tot-cold-") as empty, TemporaryFile("w+") as log:
        environment = {**os.environ, "TOT_CACHE": empty if part == "cold" else kept}
        began = time.perf_counter()
        with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=log, text=True) as process:
            assert process.stdout is not None
            answer = process.stdout.readline()
            seconds = time.perf_counter() - began
        ended = time.perf_counter() - began
        if process.returncode:
            log.seek(0)
            last = (log.read().strip() or "without a message").splitlines()[-1]
            raise OptionError(f"`{' '.join(command)}` failed with status {process.returncode}: {last}")
    return {"seconds": seconds, "ended": ended, "prompt_tokens": json.loads(answer)["usage"]["prompt_tokens"]}


def start_llama(python: Path, model: str, prompt_tokens: int) -> Measured:
    """Start a process with llama.cpp, and sample one token."""
    work = Branches(range(1000, 1000 + prompt_tokens), 1, 1)
    with ExitStack() as stack:
        seconds, _ = timed(lambda: llama_process(model, python, stack, (), cells=2048).run(work))
    return {"seconds": seconds}
