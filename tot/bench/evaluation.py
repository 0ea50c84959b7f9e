"""`tot bench eval`: what evaluating many questions at once brings, and what evaluating costs beside decoding.

The same questions one at a time and together, each run on an engine that has seen nothing; the share of the time in
which that engine computes nothing; then 10,000 samples without a model: memory as they are made, and resuming.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console
from rich.table import Table

from tot.bench.machine import spread
from tot.decoders.decoder import load_decoder
from tot.decoders.files import write_json
from tot.decoders.local import LocalDecoder
from tot.evaluation.run import evaluate
from tot.machine import describe
from tot.training.instances import make_instances

SAMPLES, QUESTIONS = 10_000, 500
_NO_MODEL: dict[str, Any] = {"search": "best-first", "generator": "enumerate:prior=uniform", "evaluator": "heuristic"}
_MIB = 2**20


def run(
    task: str,
    data: Path,
    model: str,
    searches: list[str],
    limit: int,
    max_tokens: int | None,
    together: int,
    rounds: int,
    out: Path | None,
    console: Console,
) -> None:
    """Measure, print a table and write the numbers to `out`."""
    numbers: dict[str, Any] = {}
    table = Table(
        "search", "searches at once", "problems a minute", "new tokens/s", "tokens a problem", "not computing"
    )
    with tempfile.TemporaryDirectory() as folder:
        for search in searches:
            sides: dict[int, list[dict[str, float]]] = {1: [], together: []}
            for turn in range(rounds):
                for concurrency, runs in sides.items():
                    place = Path(folder) / f"{len(numbers)}-{turn}-{concurrency}"
                    options = {"search": search, "limit": limit, "seed": turn, "concurrency": concurrency}
                    options["max_tokens"] = max_tokens
                    with load_decoder("ar", model) as decoder:
                        numbers["machine"] = describe(decoder.model.device, decoder.model.dtype)
                        runs.append(_timed(decoder, task, data, place, options))
                    said = f"{runs[-1]['problems_a_minute']:.1f} problems a minute"
                    console.print(f"round {turn + 1}: {search}, {concurrency} at once: {said}", style="dim")
            for concurrency, runs in sides.items():
                seen = {name: [run[name] for run in runs] for name in runs[0]}
                numbers[f"{search}, {concurrency} at once"] = seen
                table.add_row(
                    search,
                    str(concurrency),
                    spread(seen["problems_a_minute"]),
                    spread(seen["tokens_a_second"]),
                    spread(seen["tokens_a_problem"], 0),
                    f"{100 * statistics.median(seen['idle']):.1f}%",
                )
            pairs = zip(sides[1], sides[together], strict=True)
            ratios = [many["problems_a_minute"] / one["problems_a_minute"] for one, many in pairs]
            numbers[f"{search}: {together} at once / 1"] = ratios
            table.add_row(f"{search}, ratio (goal 3x)", f"{together} / 1", f"{spread(ratios, 2)}x", end_section=True)
        without = _without_model(Path(folder), console)
    numbers |= without
    table.caption = numbers["machine"]
    console.print(table)
    first, last = without["memory"]
    console.print(
        f"{SAMPLES:,} samples without a model: {first:.0f} MiB after a tenth, {last:.0f} at the end; a process that "
        f"resumes them takes {without['resumed']:.1f} s, {without['started']:.1f} of them its start (goal: under 5 s)"
    )
    if out is not None:
        write_json(out, numbers)


def _timed(decoder: LocalDecoder, task: str, data: Path, out: Path, options: dict[str, Any]) -> dict[str, float]:
    """One evaluation on a new engine: its speed, and the share of its time outside forwards and sampling."""
    engine = decoder.engine
    began = time.perf_counter()
    results = evaluate(task, data, decoder=decoder, out=out, **options)
    seconds = time.perf_counter() - began
    computing = sum(
        spent for account in engine.accounts.values() for what, spent in account.seconds.items() if what != "scheduling"
    )
    return {
        "seconds": seconds,
        "problems_a_minute": 60 * results.problems / seconds,
        "tokens_a_second": results.tokens / seconds,
        "tokens_a_problem": results.tokens / results.problems,
        "idle": 1 - computing / seconds,
    }


class _Memory:
    """A tracker that notes what the process holds, in MiB."""

    def __init__(self) -> None:
        self.seen: list[float] = []

    def start(self, name: str, options: Mapping[str, Any]) -> None:
        """Nothing was done yet."""

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        if step % (SAMPLES // 10) == 0:
            self.seen.append(psutil.Process().memory_info().rss / _MIB)

    def finish(self, numbers: Mapping[str, float]) -> None:
        """All is noted."""


def _without_model(folder: Path, console: Console) -> dict[str, Any]:
    """Many small searches that ask no model, then a process that finds all of them done."""
    data, out = folder / "instances.jsonl", folder / "many"
    make_instances("blocksworld", data, QUESTIONS, 0, [])
    memory, repeats = _Memory(), SAMPLES // QUESTIONS
    began = time.perf_counter()
    evaluate("blocksworld", data, model=None, repeats=repeats, track=memory, out=out, **_NO_MODEL)
    made = time.perf_counter() - began
    flags = [f"--{name}={value}" for name, value in _NO_MODEL.items()]
    command = [sys.executable, "-m", "tot.cli.app", "eval", "blocksworld", f"--data={data}", "--model=none", *flags]
    times = []
    for options in ([f"--repeats={repeats}", "--resume", f"--out={out}"], ["--help"]):
        began = time.perf_counter()
        subprocess.run([*command, *options], check=True, capture_output=True)
        times.append(time.perf_counter() - began)
    return {"memory": (memory.seen[0], memory.seen[-1]), "made": made, "resumed": times[0], "started": times[1]}
