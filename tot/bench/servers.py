"""`tot bench servers`: a search on an OpenAI-compatible server, all requests of a level in flight, and one at a time.

Each run has a seed of its own, so none finds the other's thoughts in the server's cache; what all have in common is in
it from a run beforehand.
"""

from __future__ import annotations

import tempfile
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from tot.bench.evaluation import SPEED
from tot.bench.harness import Bench, Measured, Metric, Side, percent, plain, timed
from tot.decoders.decoder import load_decoder
from tot.decoders.kernels.native import processor
from tot.evaluation.run import evaluate

TOGETHER, ALONE = "all of a level in flight", "one request at a time"


def run(
    base_url: str,
    model: str,
    data: Path,
    concurrency: int,
    rounds: int,
    out: Path | None,
    console: Console,
    *,
    task: str = "gsm8k",
    limit: int = 16,
    **options: Any,
) -> None:
    """Measure, print a table and write the numbers to `out`. `options` go to `evaluate`."""

    def searched(name: str, most: int, turn: int) -> Measured:
        """One evaluation, all problems at once, with at most so many requests in flight."""
        place = {"base_url": base_url, "concurrency": most}
        with tempfile.TemporaryDirectory() as folder, load_decoder("openai", model, **place) as decoder:
            work = partial(evaluate, task, data, out=Path(folder) / "run", decoder=decoder, limit=limit, **options)
            seconds, results = timed(lambda: work(concurrency=limit, seed=2 * turn + (name == ALONE)))
            spent: Any = decoder.spent
        return {
            "seconds": seconds,
            "problems": results.problems,
            "tokens": spent.new_tokens,
            "requests": spent.requests,
            "cached": spent.cached_tokens / max(1, spent.prompt_tokens),
            "failed": results.errors,
        }

    metrics = [
        *SPEED,
        Metric("requests", lambda took: took["requests"], plain(".0f")),
        Metric("prompt tokens cached", lambda took: took["cached"], percent),
        Metric("searches that failed", lambda took: took["failed"], lambda values: f"{sum(values):.0f}"),
    ]
    sides = [Side(name, partial(searched, name, most)) for name, most in {ALONE: 1, TOGETHER: concurrency}.items()]
    asked = {"url": base_url, "model": model, "task": task, "data": data, "rounds": rounds, "limit": limit, **options}
    machine = f"client on {processor()}; server {base_url}, model {model}"
    with Bench(console, out, machine, {**asked, "concurrency": concurrency}) as bench:
        bench.say("a run beforehand, so that the server has seen the questions …")
        searched(TOGETHER, concurrency, rounds)
        title = f"{limit} {task} problems, {', '.join(f'{name} {value}' for name, value in options.items())}"
        bench.compare(title, sides, lambda _, turn: turn, rounds=rounds, metrics=metrics, against=[ALONE])
