"""`tot bench ray`: what a second Ray worker brings. One worker of one core against two, taking turns on one cluster.

Each worker searches as many questions at once on both sides. Starting workers is left out of the speed, and told.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from tot.bench.machine import spread
from tot.decoders.files import write_json
from tot.decoders.models.loading import resolve_device, resolve_dtype
from tot.evaluation.run import evaluate, require_ray
from tot.machine import describe

SIDES, GOAL = (1, 2), 1.4


def run(
    task: str,
    data: Path,
    model: str,
    limit: int,
    concurrency: int,
    rounds: int,
    out: Path | None,
    console: Console,
    **options: Any,
) -> None:
    """Measure, print a table and write the numbers to `out`. `concurrency` is each worker's; `options` go to
    `evaluate`."""
    require_ray()
    from tot.evaluation.ray_cluster import cluster

    sides: dict[int, list[dict[str, float]]] = {replicas: [] for replicas in SIDES}
    with tempfile.TemporaryDirectory() as folder, cluster(None):
        for turn in range(rounds):
            for replicas, runs in sides.items():
                clock = _Clock()
                results = evaluate(
                    task,
                    data,
                    out=Path(folder) / f"{turn}-{replicas}",
                    limit=limit,
                    model=model,
                    concurrency=concurrency * replicas,
                    executor="ray",
                    replicas=replicas,
                    seed=turn,
                    track=clock,
                    **options,
                )
                minutes = (clock.last - clock.began) / 60
                runs.append(
                    {
                        "problems_a_minute": results.problems / minutes,
                        "tokens_a_second": results.tokens / (60 * minutes),
                        "seconds_to_start": clock.began - clock.started,
                    }
                )
                said = f"{runs[-1]['problems_a_minute']:.1f} problems a minute"
                console.print(f"round {turn + 1}: workers: {replicas}, {said}", style="dim")
    device = resolve_device("cpu")
    numbers: dict[str, Any] = {"machine": describe(device, resolve_dtype("auto", device))}
    table = Table(
        "workers of one core",
        "problems a minute",
        "new tokens/s",
        "seconds to start",
        title=f"{model}: {limit} problems of {task}, {concurrency} at once on each worker, rounds: {rounds}",
        caption=numbers["machine"],
    )
    for replicas, runs in sides.items():
        seen = {name: [one[name] for one in runs] for name in runs[0]}
        numbers[f"{replicas} workers"] = seen
        table.add_row(str(replicas), *(spread(values) for values in seen.values()))
    pairs = zip(*sides.values(), strict=True)
    ratios = [two["problems_a_minute"] / one["problems_a_minute"] for one, two in pairs]
    numbers |= {"ratios": ratios, "ratio": statistics.median(ratios)}
    table.add_row(f"2 / 1 (goal {GOAL}x)", f"{spread(ratios, 2)}x", "", "")
    console.print(table)
    if out is not None:
        write_json(out, numbers)


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
