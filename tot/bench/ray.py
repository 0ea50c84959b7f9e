"""`tot bench ray`: what a second Ray worker brings. One worker of one core against two, taking turns on one cluster.

Each worker searches as many questions at once on both sides. Starting workers is left out of the speed, and told.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from tot.bench.evaluation import SPEED
from tot.bench.harness import Bench, Measured, Metric, Side
from tot.decoders.models.loading import resolve_device, resolve_dtype
from tot.evaluation.run import evaluate, require_ray
from tot.machine import describe


def run(
    data: Path,
    concurrency: int,
    rounds: int,
    out: Path | None,
    console: Console,
    *,
    task: str = "gsm8k",
    **options: Any,
) -> None:
    """Measure, print a table and write the numbers to `out`. `concurrency` is each worker's; `options` go to
    `evaluate`."""
    require_ray()
    from tot.evaluation.ray_cluster import cluster

    def searched(replicas: int, seed: int) -> Measured:
        clock = _Clock()
        with tempfile.TemporaryDirectory() as folder:
            results = evaluate(
                task,
                data,
                out=Path(folder) / "run",
                concurrency=concurrency * replicas,
                executor="ray",
                replicas=replicas,
                seed=seed,
                track=clock,
                **options,
            )
        start = {"start": clock.began - clock.started}
        return {"seconds": clock.last - clock.began, "problems": results.problems, "tokens": results.tokens, **start}

    device = resolve_device("cpu")
    asked = {"task": task, "data": data, "concurrency": concurrency, "rounds": rounds, **options}
    sides = [Side(f"{replicas} worker{'s' * (replicas > 1)}", partial(searched, replicas)) for replicas in (1, 2)]
    metrics = [*SPEED, Metric("seconds to start", lambda took: took["start"], less=True)]
    title = f"workers of one core, {concurrency} searches at once on each"
    with Bench(console, out, describe(device, resolve_dtype("auto", device)), asked) as bench, cluster(None):
        bench.compare(title, sides, lambda _, turn: turn, rounds=rounds, metrics=metrics, against=[sides[0].name])


class _Clock:
    """A tracker that notes when the first search began, and when the last one ended."""

    def __init__(self) -> None:
        self.started = self.last = 0.0
        self.began = float("inf")

    def start(self, name: str, options: Mapping[str, Any]) -> None:
        self.started = time.perf_counter()

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        self.last = time.perf_counter()
        self.began = min(self.began, self.last - numbers["seconds"])

    def finish(self, numbers: Mapping[str, float]) -> None:
        """All is noted."""
