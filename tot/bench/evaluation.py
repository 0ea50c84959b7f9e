"""`tot bench eval`, `ray` and `servers`: what evaluating many questions at once brings, on an engine of our own, on a
second Ray worker, and on a server.

Every run evaluates the same questions, from an engine or a seed that has seen nothing of them.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from tot.bench.harness import Bench, Measured, Metric, Side, percent, plain, timed
from tot.bench.options import EvalOptions, RayOptions, ServersOptions
from tot.decoders.decoder import load_decoder
from tot.decoders.kernels.native import processor
from tot.decoders.models.loading import resolve_device, resolve_dtype
from tot.evaluation.results import Results
from tot.evaluation.run import evaluate, require_ray
from tot.machine import describe

TOGETHER, ALONE = "all of a level in flight", "one request at a time"
SPEED = (
    Metric("problems a minute", lambda took: 60 * took["problems"] / took["seconds"]),
    Metric("new tokens/s", lambda took: took["tokens"] / took["seconds"]),
)


def evaluated(asked: EvalOptions, **how: Any) -> Results:
    """One evaluation, into a folder that is thrown away."""
    with tempfile.TemporaryDirectory() as folder:
        given: dict[str, Any] = {"limit": asked.limit, "max_tokens": asked.max_tokens}
        given |= {"search": asked.search, "prompts": "papers"}
        return evaluate(asked.task, asked.data, out=Path(folder) / "run", **given, **how)


def run(asked: EvalOptions, console: Console) -> None:
    """Many at once against one at a time."""

    def searched(concurrency: int, turn: int) -> Measured:
        """On a new engine: its speed, and the share of its time outside forwards and sampling."""
        with load_decoder("ar", asked.model) as decoder:
            seconds, results = timed(lambda: evaluated(asked, decoder=decoder, seed=turn, concurrency=concurrency))
            spent = [each for account in decoder.engine.accounts.values() for each in account.seconds.items()]
        computing = sum(value for what, value in spent if what != "scheduling")
        counted = {"problems": results.problems, "tokens": results.tokens}
        return {"seconds": seconds, **counted, "idle": 1 - computing / seconds}

    metrics = [
        *SPEED,
        Metric("tokens a problem", lambda took: took["tokens"] / took["problems"], plain(".0f")),
        Metric("not computing", lambda took: took["idle"], percent),
    ]
    sides = [Side(f"{count} at once", partial(searched, count)) for count in (1, asked.concurrency)]
    _compare(asked, console, sides, metrics, _here("auto"))


def run_ray(asked: RayOptions, console: Console) -> None:
    """One worker of one core against two, on one cluster. Each searches as many questions at once on both sides.
    Starting workers is left out of the speed, and told."""
    require_ray()
    from tot.evaluation.ray_cluster import cluster

    def searched(replicas: int, turn: int) -> Measured:
        clock = _Clock()
        workers: dict[str, Any] = {"executor": "ray", "replicas": replicas, "concurrency": replicas * asked.concurrency}
        results = evaluated(asked, model=asked.model, seed=turn, track=clock, **workers)
        counted = {"problems": results.problems, "tokens": results.tokens, "start": clock.began - clock.started}
        return {"seconds": clock.last - clock.began, **counted}

    sides = [Side(f"{replicas} worker{'s' * (replicas > 1)}", partial(searched, replicas)) for replicas in (1, 2)]
    metrics = [*SPEED, Metric("seconds to start", lambda took: took["start"], less=True)]
    with cluster(None):
        _compare(asked, console, sides, metrics, _here("cpu"))


def run_servers(asked: ServersOptions, console: Console) -> None:
    """On an OpenAI-compatible server all requests of a level in flight, and one at a time. Each run has a seed of its
    own, so none finds the other's thoughts in the server's cache; what all have in common is in it from a warm-up."""

    def searched(name: str, turn: int) -> Measured:
        place = {"base_url": asked.base_url, "concurrency": 1 if name == ALONE else asked.concurrency}
        with load_decoder("openai", asked.model, **place) as decoder:
            seed = 2 * turn + (name == ALONE)
            seconds, results = timed(lambda: evaluated(asked, decoder=decoder, concurrency=asked.limit, seed=seed))
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
    sides = [Side(name, partial(searched, name)) for name in (ALONE, TOGETHER)]
    searched(TOGETHER, asked.rounds)
    _compare(asked, console, sides, metrics, f"client on {processor()}; server {asked.base_url}, model {asked.model}")


def _compare(asked: EvalOptions, console: Console, sides: list[Side], metrics: list[Metric], machine: str) -> None:
    title = f"{asked.limit} {asked.task} problems, search {asked.search or 'of the task'}"
    with Bench(asked, console, machine) as bench:
        rounds = asked.rounds
        bench.compare(title, sides, lambda _, turn: turn, rounds=rounds, metrics=metrics, against=[sides[0].name])


def _here(device: str) -> str:
    found = resolve_device(device)
    return describe(found, resolve_dtype("auto", found))


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
