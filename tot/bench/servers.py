"""`tot bench servers`: a search on an OpenAI-compatible server, all requests of a level in flight, and one at a time.

The same questions on both sides, in turns, the one that begins changing from round to round. Each run has a seed of its
own, so none finds the other's thoughts in the server's cache; what all have in common is in it from a run beforehand.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from tot.bench.machine import spread
from tot.decoders.decoder import load_decoder
from tot.decoders.files import write_json
from tot.decoders.kernels.native import processor
from tot.evaluation.run import evaluate

TOGETHER, ALONE = "all of a level in flight", "one request at a time"


@dataclass(frozen=True)
class Asked:
    """What is searched, and where."""

    base_url: str
    model: str
    """Its name at the server."""
    data: Path
    task: str = "gsm8k"
    search: str = "bfs:thoughts=3,breadth=2,depth=3"
    limit: int = 16
    max_tokens: int = 48
    concurrency: int = 64


def run(asked: Asked, rounds: int, out: Path | None, console: Console) -> None:
    """Measure, print a table and write the numbers to `out`."""
    sides = {TOGETHER: asked.concurrency, ALONE: 1}
    runs: dict[str, list[dict[str, float]]] = {side: [] for side in sides}
    machine = f"client on {processor()}; server {asked.base_url}, model {asked.model}"
    console.print("a run beforehand, so that the server has seen the questions …", style="dim")
    _timed(asked, asked.concurrency, seed=0)
    for turn in range(rounds):
        order = list(sides) if turn % 2 == 0 else list(reversed(sides))
        for side in order:
            runs[side].append(_timed(asked, sides[side], seed=1 + 2 * turn + (side == ALONE)))
            said = f"{runs[side][-1]['problems_a_minute']:.1f} problems a minute"
            console.print(f"round {turn + 1}: {side}: {said}", style="dim")
    table = Table(
        *("side", "problems a minute", "new tokens/s", "requests", "prompt tokens cached", "searches that failed"),
        title=f"{asked.limit} {asked.task} problems, {asked.search}, at most {asked.max_tokens} tokens a text, "
        f"{rounds} rounds",
        caption=machine,
    )
    for side, each in runs.items():
        seen = {name: [one[name] for one in each] for name in each[0]}
        table.add_row(
            side,
            spread(seen["problems_a_minute"]),
            spread(seen["tokens_a_second"]),
            spread(seen["requests"], 0),
            f"{100 * statistics.median(seen['cached']):.0f}%",
            f"{sum(seen['failed']):.0f}",
        )
    ratios = {
        name: [many[name] / one[name] for many, one in zip(runs[TOGETHER], runs[ALONE], strict=True)]
        for name in ("problems_a_minute", "tokens_a_second")
    }
    shown = [f"{spread(ratio, 2)}x" for ratio in ratios.values()]
    table.add_section()
    table.add_row("ratio, by round (goal 3x)", *shown)
    console.print(table)
    if out is not None:
        about = {"machine": machine, "asked": {**asdict(asked), "data": str(asked.data)}}
        write_json(out, {**about, **runs, "ratios": ratios})


def _timed(asked: Asked, concurrency: int, seed: int) -> dict[str, float]:
    """One evaluation, all problems at once, with at most so many requests in flight."""
    with (
        tempfile.TemporaryDirectory() as folder,
        load_decoder("openai", asked.model, base_url=asked.base_url, concurrency=concurrency) as decoder,
    ):
        began = time.perf_counter()
        results = evaluate(
            asked.task,
            asked.data,
            out=Path(folder) / "run",
            limit=asked.limit,
            concurrency=asked.limit,
            decoder=decoder,
            search=asked.search,
            max_tokens=asked.max_tokens,
            seed=seed,
        )
        seconds = time.perf_counter() - began
        spent: Any = decoder.spent
    return {
        "seconds": seconds,
        "problems_a_minute": 60 * results.problems / seconds,
        "tokens_a_second": spent.new_tokens / seconds,
        "requests": spent.requests,
        "cached": spent.cached_tokens / max(1, spent.prompt_tokens),
        "failed": results.errors,
    }
