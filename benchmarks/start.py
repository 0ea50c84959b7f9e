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
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory, TemporaryFile
from typing import Any

from rich.console import Console

from benchmarks.engines import SideError
from benchmarks.harness import Bench, Measured, Measurements, Metric, Side, by_column, timed
from benchmarks.options import StartOptions
from benchmarks.peers.sides import LLAMA, OURS
from benchmarks.peers.worker import PeerWorker
from benchmarks.workloads import branches
from tot.decoders.errors import OptionError
from tot.decoders.machine import describe, threads
from tot.decoders.models.model_names import find_model
from tot.evaluation.estimate import spread

_SECONDS = Metric("seconds", lambda measured: measured["seconds"], partial(spread, form=".2f"), less=True)
_ENDED = Metric("to the end of its process", lambda measured: measured.get("ended"), _SECONDS.show, less=True)
_CELLS = 2048
"""Tokens of llama.cpp's cache."""


def run(asked: StartOptions, console: Console) -> None:
    """Run the benchmark and print its table. Raises OptionError if our command fails."""
    bench = Bench(asked, console, describe("cpu"))
    with TemporaryDirectory(prefix="tot-start-") as kept:
        bench.say("our first run, unmeasured …")
        prompt_tokens = start_ours(asked, Path(kept), "warm")["prompt_tokens"]
        sides = [Side(OURS, partial(start_ours, asked, Path(kept)))]
        file = find_model(asked.model)
        if file.suffix == ".gguf" and asked.llama.exists():
            sides.append(Side(LLAMA, lambda column: start_llama(asked.llama, file, prompt_tokens)))
        else:
            bench.say(f"{LLAMA} is left out: give a .gguf file as --model, and run `make peers`")
        title = f"{asked.model}: seconds to the first token after {prompt_tokens} tokens"

        def table(results: Measurements) -> Any:
            return by_column(
                results, _SECONDS, title, ratios=[(OURS, LLAMA)] if len(sides) > 1 else (), others=[_ENDED]
            )

        bench.compare(
            title,
            sides,
            lambda column, turn: column,
            columns=asked.parts,
            rounds=asked.rounds,
            failing=True,
            table=table,
        )


def start_ours(asked: StartOptions, kept: Path, part: str) -> Measured:
    """Run our command once with the cache folder `kept`, or in the part "cold" with a new one."""
    command = [sys.executable, "-m", "tot", "solve", asked.task, "--model", asked.model]
    command += ["--search", "cot", "--max-tokens", "1", "--json"]
    with TemporaryDirectory(prefix="tot-cold-") as empty, TemporaryFile("w+") as log:
        environment = {**os.environ, "TOT_CACHE": empty if part == "cold" else str(kept)}
        began = time.perf_counter()
        with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=log, text=True) as process:
            assert process.stdout is not None
            answer = process.stdout.readline()
            seconds = time.perf_counter() - began
        ended = time.perf_counter() - began
        if process.returncode:
            log.seek(0)
            last = (log.read().strip() or "it says nothing").splitlines()[-1]
            raise OptionError(f"`{' '.join(command)}` failed with status {process.returncode}: {last}")
    return {"seconds": seconds, "ended": ended, "prompt_tokens": json.loads(answer)["usage"]["prompt_tokens"]}


def start_llama(python: Path, file: Path, prompt_tokens: int) -> Measured:
    """Start a process with llama.cpp, and sample one token."""
    prompt = [1000 + number for number in range(prompt_tokens)]
    load = {"model": str(file), "precision": "own", "folder": "", "threads": threads(), "cells": _CELLS}

    def sample() -> PeerWorker:
        worker = PeerWorker(python, Path(__file__).parent / "peers" / "llama_worker.py", load)
        try:
            worker.run(branches(prompt, 1, 1))
        except SideError:
            worker.close()
            raise
        return worker

    seconds, worker = timed(sample)
    worker.close()
    return {"seconds": seconds}
