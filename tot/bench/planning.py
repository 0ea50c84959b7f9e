"""What the model adds to a search, and what the search adds by itself: solved Blocksworld instances, side by side.

Every search runs twice on the same instances with the same limits: asking the model, and with uniformly random priors
and values in its place. The known plans choose the instances; no search sees their length.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from statistics import fmean
from typing import Any

from rich.console import Console

from tot.bench.harness import Bench, Measured, Metric, Side, percent, timed
from tot.bench.options import PlanningOptions
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


def run(asked: PlanningOptions, console: Console) -> None:
    """Print the table. Chance is averaged over all rounds, and the model asked in the first."""
    task = load_task("blocksworld")
    instances = [row for row in rows(asked.data) if int(row["steps"]) <= asked.steps]
    if len(instances) < asked.count:
        found = f"{asked.data} has {len(instances)} instances of up to {asked.steps} steps"
        raise OptionError(f"{found}, not {asked.count}: ask for fewer")
    chosen = random.Random(0).sample(instances, asked.count)
    lengths = sorted({int(row["steps"]) for row in chosen})

    def solved(parts: Mapping[str, Any], seed: int) -> Measured:
        seconds, solutions = timed(lambda: asyncio.run(_solve_all(task, chosen, parts, asked.nodes, seed)))
        paired = list(zip(solutions, chosen, strict=True))
        return {
            "seconds": seconds,
            "solved": fmean(one.solved for one in solutions),
            **{f"of {n} steps": fmean(one.solved for one, row in paired if int(row["steps"]) == n) for n in lengths},
            "model calls": fmean(one.calls for one in solutions),
            "thoughts": fmean(len(one.tree) - 1 for one in solutions),
        }

    def metric(name: str, show: Callable[[Sequence[float]], str]) -> Metric:
        return Metric(name, lambda took: took[name], show)

    metrics = [metric(name, percent) for name in ("solved", *(f"of {n} steps" for n in lengths))]
    metrics += [metric(name, lambda values: f"{fmean(values):.1f}") for name in ("model calls", "thoughts")]
    with load_decoder("ar", asked.model) as decoder:
        machine = describe(decoder.model.device, decoder.model.dtype)
        with Bench(asked, console, machine) as bench:
            by: dict[bool, dict[str, Any]] = {True: {"decoder": decoder}, False: {"model": None}}
            sides = [
                Side(name, partial(solved, {**parts, **by[asks]}), rounds=1 if asks else None)
                for name, parts, asks in searches(task)
            ]
            title = (
                f"{asked.count} instances of {asked.data.name}, at most {asked.nodes} thoughts a search; {asked.model}"
            )
            bench.compare(title, sides, lambda _, turn: turn, rounds=asked.rounds, metrics=metrics)


async def _solve_all(
    task: Task, chosen: Sequence[dict[str, Any]], parts: Mapping[str, Any], nodes: int, seed: int
) -> list[Solution]:
    """All instances, some at once, in their order."""
    places = asyncio.Semaphore(_AT_ONCE)

    async def solve(row: dict[str, Any]) -> Solution:
        async with places:
            return await asolve(task, task.question_of(row), **parts, budget=Budget(nodes=nodes), seed=seed)

    return list(await asyncio.gather(*map(solve, chosen)))
