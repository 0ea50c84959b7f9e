"""`tot bench eval`: what evaluating many questions at once brings, and what evaluating costs beside decoding.

The same questions one at a time and together, each run on an engine that has seen nothing; the share of the time in
which that engine computes nothing; then 10,000 samples without a model: memory as they are made, and resuming.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console

from tot.bench.harness import Bench, Measured, Metric, Side, percent, plain, timed
from tot.decoders.decoder import load_decoder
from tot.decoders.models.loading import resolve_device, resolve_dtype
from tot.evaluation.run import evaluate
from tot.machine import describe
from tot.training.instances import make_instances

SAMPLES, QUESTIONS = 10_000, 500
_NO_MODEL: dict[str, Any] = {"search": "best-first", "generator": "enumerate:prior=uniform", "evaluator": "heuristic"}
_MIB = 2**20
SPEED = (
    Metric("problems a minute", lambda took: 60 * took["problems"] / took["seconds"]),
    Metric("new tokens/s", lambda took: took["tokens"] / took["seconds"]),
)


def run(
    data: Path,
    searches: list[str],
    together: int,
    rounds: int,
    out: Path | None,
    console: Console,
    *,
    task: str = "gsm8k",
    model: str = "smollm2-135m",
    **options: Any,
) -> None:
    """Measure, print a table a search and write the numbers to `out`. `options` go to `evaluate`."""
    metrics = [
        *SPEED,
        Metric("tokens a problem", lambda took: took["tokens"] / took["problems"], plain(".0f")),
        Metric("not computing", lambda took: took["idle"], percent),
    ]

    def evaluated(concurrency: int, asked: Mapping[str, Any]) -> Measured:
        """On a new engine: its speed, and the share of its time outside forwards and sampling."""
        with tempfile.TemporaryDirectory() as folder, load_decoder("ar", model) as decoder:
            work = partial(evaluate, task, data, decoder=decoder, out=Path(folder) / "run", **options, **asked)
            seconds, results = timed(lambda: work(concurrency=concurrency))
            spent = [each for account in decoder.engine.accounts.values() for each in account.seconds.items()]
        computing = sum(value for what, value in spent if what != "scheduling")
        counted = {"problems": results.problems, "tokens": results.tokens}
        return {"seconds": seconds, **counted, "idle": 1 - computing / seconds}

    asked = {"task": task, "data": data, "model": model, "together": together, "rounds": rounds, **options}
    device = resolve_device("auto")
    with Bench(console, out, describe(device, resolve_dtype("auto", device)), asked) as bench:
        sides = [Side(f"{count} at once", partial(evaluated, count)) for count in (1, together)]
        for search in searches:
            bench.compare(
                search,
                sides,
                lambda _, turn, search=search: {"search": search, "seed": turn},  # type: ignore[misc]
                rounds=rounds,
                metrics=metrics,
                against=[sides[0].name],
            )
        found = bench.once("without a model", without_model)
        first, last = found["memory"]
        bench.show(
            f"{SAMPLES:,} samples without a model: {first:.0f} MiB after a tenth, {last:.0f} at the end; a process "
            f"that resumes them takes {found['resumed']:.1f} s, {found['started']:.1f} of them its start"
        )


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


def without_model() -> dict[str, Any]:
    """Many small searches that ask no model, then a process that finds all of them done."""
    with tempfile.TemporaryDirectory() as folder:
        data, out = Path(folder) / "instances.jsonl", Path(folder) / "many"
        make_instances("blocksworld", data, QUESTIONS, 0, [])
        memory, repeats = _Memory(), SAMPLES // QUESTIONS
        work = partial(evaluate, "blocksworld", data, model=None, repeats=repeats, track=memory, out=out, **_NO_MODEL)
        made, _ = timed(work)
        flags = [f"--{name}={value}" for name, value in _NO_MODEL.items()]
        command = [sys.executable, "-m", "tot.cli.app", "eval", "blocksworld", f"--data={data}", "--model=none", *flags]
        resumed, started = (
            timed(lambda: subprocess.run([*command, *options], check=True, capture_output=True))[0]  # noqa: B023
            for options in ([f"--repeats={repeats}", "--resume", f"--out={out}"], ["--help"])
        )
    return {"memory": (memory.seen[0], memory.seen[-1]), "made": made, "resumed": resumed, "started": started}
