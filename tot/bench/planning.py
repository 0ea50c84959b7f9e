"""What the model adds to a search, and what the search adds by itself: solved Blocksworld instances, side by side.

Every search runs twice on the same instances with the same limits: asking the model, and with uniformly random priors
and values in its place. The known plans choose the instances; no search sees their length.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

from rich.console import Console

from tot.bench.harness import Bench, Measured, Metric, Side, percent, timed
from tot.data import rows
from tot.decoders.budget import Budget
from tot.decoders.decoder import load_decoder
from tot.decoders.errors import OptionError
from tot.evaluators.combine import Combine
from tot.evaluators.heuristic import Prior, Random
from tot.evaluators.likelihood import Likelihood
from tot.generators.enumerate import Enumerate
from tot.generators.sample import Sample
from tot.machine import describe
from tot.registry import GENERATORS, load_task, named, rap
from tot.search import BFS, BestFirst
from tot.solver import Solution, asolve
from tot.task import Task

_AT_ONCE = 16
"""Instances whose searches share forward passes."""


def searches(task: Task) -> list[tuple[str, Mapping[str, Any], bool]]:
    """(name, parts, whether it asks the model) of the searches compared; of each, first with the model and then by
    chance."""
    bfs_name, rap_name, best_name = "BFS as in SEED", "RAP-MCTS", "best-first by priors"
    reasoning = rap(task)
    ranked = named(task.generator, GENERATORS)
    random_order = Enumerate(prior="random")
    guessed = Combine(evaluators=(Prior(), Random()), weights=(0.5, 0.5), rule="log")
    bfs = {"search": BFS(thoughts=3, breadth=3)}
    best_first = {"search": BestFirst(rank="prior"), "evaluator": Random()}
    return [
        (bfs_name, bfs | {"generator": Sample(temperature=1.0), "evaluator": Likelihood()}, True),
        (f"{bfs_name}, legal actions ranked", bfs | {"generator": ranked, "evaluator": Likelihood()}, True),
        (f"{bfs_name}, by chance", bfs | {"generator": random_order, "evaluator": Random()}, False),
        (rap_name, reasoning, True),
        (f"{rap_name}, by chance", reasoning | {"generator": random_order, "evaluator": guessed}, False),
        (best_name, best_first | {"generator": ranked}, True),
        (f"{best_name}, by chance", best_first | {"generator": random_order}, False),
    ]


def run(
    data: Path, model: str, count: int, steps: int, nodes: int, seeds: int, out: Path | None, console: Console
) -> None:
    """Print the table. `nodes` thoughts at most a search; chance is averaged over `seeds` runs."""
    task = load_task("blocksworld")
    instances = [row for row in rows(data) if int(row["steps"]) <= steps]
    if len(instances) < count:
        raise OptionError(f"{data} has {len(instances)} instances of up to {steps} steps, not {count}: ask for fewer")
    chosen = random.Random(0).sample(instances, count)
    lengths = [int(row["steps"]) for row in chosen]

    def solved(parts: Mapping[str, Any], seed: int) -> Measured:
        seconds, solutions = timed(lambda: asyncio.run(_solve_all(task, chosen, parts, nodes, seed)))
        by_length = {
            str(length): fmean(one.solved for one, of in zip(solutions, lengths, strict=True) if of == length)
            for length in sorted(set(lengths))
        }
        return {
            "seconds": seconds,
            "solved": fmean(one.solved for one in solutions),
            "by_length": by_length,
            "calls": fmean(one.calls for one in solutions),
            "thoughts": fmean(len(one.tree) - 1 for one in solutions),
        }

    metrics = [Metric("solved", lambda took: took["solved"], percent)]
    metrics += [
        Metric(f"of {length} steps", lambda took, length=length: took["by_length"][str(length)], percent)  # type: ignore[misc]
        for length in sorted(set(lengths))
    ]
    metrics += [
        Metric(heading, lambda took, name=name: took[name], lambda values: f"{fmean(values):.1f}")  # type: ignore[misc]
        for heading, name in {"model calls": "calls", "thoughts": "thoughts"}.items()
    ]
    asked = {"data": data, "model": model, "count": count, "steps": steps, "nodes": nodes, "seeds": seeds}
    with load_decoder("ar", model) as decoder:
        machine = describe(decoder.model.device, decoder.model.dtype)
        with Bench(console, out, machine, asked) as bench:
            by: dict[bool, dict[str, Any]] = {True: {"decoder": decoder}, False: {"model": None}}
            sides = [
                Side(name, partial(solved, {**parts, **by[asks]}), rounds=1 if asks else None)
                for name, parts, asks in searches(task)
            ]
            title = f"{count} instances of {data.name}, at most {nodes} thoughts a search; {model}"
            bench.compare(title, sides, lambda _, turn: turn, rounds=seeds, metrics=metrics)


async def _solve_all(
    task: Task, chosen: Sequence[dict[str, Any]], parts: Mapping[str, Any], nodes: int, seed: int
) -> list[Solution]:
    """All instances, some at once, in their order."""
    places = asyncio.Semaphore(_AT_ONCE)

    async def solve(row: dict[str, Any]) -> Solution:
        async with places:
            return await asolve(task, task.question_of(row), **parts, budget=Budget(nodes=nodes), seed=seed)

    return list(await asyncio.gather(*map(solve, chosen)))
