"""`tot bench servers`: what a server brings with all requests of a level in flight, against one at a time.

Both sides evaluate the same questions. Each run has a seed of its own, so none finds the other's thoughts in the
server's cache; what all have in common is in it from a warm-up.
"""

from __future__ import annotations

import tempfile
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from tot.bench.harness import Bench, Measured, Metric, Side, percent, plain, timed
from tot.bench.options import ServersOptions
from tot.decoders.decoder import load_decoder
from tot.decoders.kernels.native import processor
from tot.evaluation.run import evaluate

TOGETHER, ALONE = "all of a level in flight", "one request at a time"
_METRICS = (
    Metric("problems a minute", lambda took: 60 * took["problems"] / took["seconds"]),
    Metric("new tokens/s", lambda took: took["tokens"] / took["seconds"]),
    Metric("requests", lambda took: took["requests"], plain(".0f")),
    Metric("prompt tokens cached", lambda took: took["cached"], percent),
    Metric("searches that failed", lambda took: took["failed"], lambda values: f"{sum(values):.0f}"),
)


def run(asked: ServersOptions, console: Console) -> None:
    """Measure, and print the tables."""

    def searched(name: str, turn: int) -> Measured:
        given: dict[str, Any] = {"limit": asked.limit, "max_tokens": asked.max_tokens, "concurrency": asked.limit}
        given |= {"search": asked.search, "prompts": "papers", "seed": 2 * turn + (name == ALONE)}
        place = {"base_url": asked.base_url, "concurrency": 1 if name == ALONE else asked.concurrency}
        with load_decoder("openai", asked.model, **place) as decoder, tempfile.TemporaryDirectory() as folder:
            work = partial(evaluate, asked.task, asked.data, out=Path(folder) / "run", decoder=decoder, **given)
            seconds, results = timed(work)
            spent: Any = decoder.spent
        return {
            "seconds": seconds,
            "problems": results.problems,
            "tokens": spent.new_tokens,
            "requests": spent.requests,
            "cached": spent.cached_tokens / max(1, spent.prompt_tokens),
            "failed": results.errors,
        }

    sides = [Side(name, partial(searched, name)) for name in (ALONE, TOGETHER)]
    searched(TOGETHER, asked.rounds)
    title = f"{asked.limit} {asked.task} problems, search {asked.search}"
    machine = f"client on {processor()}; server {asked.base_url}, model {asked.model}"
    with Bench(asked, console, machine) as bench:
        bench.compare(title, sides, lambda _, turn: turn, rounds=asked.rounds, metrics=_METRICS, against=[ALONE])
