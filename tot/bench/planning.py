"""What the model adds to a search, and what the search adds by itself: solved Blocksworld instances, side by side.

Every search runs twice on the same instances with the same limits: asking the model, and with uniformly random priors
and values in its place. The known plans choose the instances; no search sees their length.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from rich.console import Console
from rich.progress import track
from rich.table import Table

from tot.data import rows
from tot.decoders.budget import Budget
from tot.decoders.decoder import load_decoder
from tot.decoders.errors import OptionError
from tot.decoders.local import LocalDecoder
from tot.evaluators.combine import Combine, Prior, Random
from tot.evaluators.model import Likelihood
from tot.generators.base import Enumerate, Sample
from tot.machine import describe
from tot.registry import GENERATORS, load_task, named, rap
from tot.search import BFS, BestFirst
from tot.solver import Solution, asolve
from tot.task import Task

_AT_ONCE = 16
"""Instances whose searches share forward passes."""


@dataclass(frozen=True)
class Side:
    """A search as it is run: with the model, or with chance in its place."""

    name: str
    parts: dict[str, Any]
    model: bool


def sides(task: Task) -> list[Side]:
    """The searches compared; of each, first with the model and then by chance."""
    reasoning = rap(task)
    ranked = named("generator", task.generator, GENERATORS)
    chance = {"generator": Enumerate(prior="random"), "evaluator": Random()}
    guessed = Combine(parts=(Prior(), Random()), weights=(0.5, 0.5), rule="log")
    bfs = {"search": BFS(thoughts=3, breadth=3)}
    best_first = {"search": BestFirst(rank="prior"), "evaluator": Random()}
    written = {"generator": Sample(temperature=1.0), "evaluator": Likelihood()}
    return [
        Side("BFS as in SEED (n = 3, b = 3, T = 7)", bfs | written, True),
        Side("the same, legal actions ranked", bfs | {"generator": ranked, "evaluator": Likelihood()}, True),
        Side("the same, by chance", bfs | chance, False),
        Side("RAP-MCTS (10 iterations, T = 7)", reasoning, True),
        Side("the same, by chance", reasoning | {"generator": Enumerate(prior="random"), "evaluator": guessed}, False),
        Side("best-first, priors of Enumerate", best_first | {"generator": ranked}, True),
        Side("the same, by chance", best_first | chance, False),
    ]


def run(data: Path, model: str, count: int, steps: int, nodes: int, seeds: int, console: Console) -> None:
    """Print the table. `nodes` thoughts at most a search; chance is averaged over `seeds` runs."""
    task = load_task("blocksworld")
    instances = [row for row in rows(data) if int(row["steps"]) <= steps]
    if len(instances) < count:
        raise OptionError(f"{data} has {len(instances)} instances of up to {steps} steps, not {count}: ask for fewer")
    chosen = random.Random(0).sample(instances, count)
    lengths = sorted({int(row["steps"]) for row in chosen})
    columns = ("search", "solved", *(f"of {length} steps" for length in lengths), "model calls", "thoughts")
    table = Table(*columns)
    with load_decoder("ar", model) as decoder:
        where = describe(decoder.model.device, decoder.model.dtype)
        console.print(f"{count} instances of {data.name}, at most {nodes} thoughts a search; {model}; {where}")
        for side in sides(task):
            runs = [
                asyncio.run(_solve_all(task, chosen, side, decoder if side.model else None, nodes, seed))
                for seed in track(range(1 if side.model else seeds), side.name, console=console, transient=True)
            ]
            every = [solution for solutions in runs for solution in solutions]
            by_length = [
                _share([s for run in runs for s, row in zip(run, chosen, strict=True) if int(row["steps"]) == length])
                for length in lengths
            ]
            table.add_row(
                side.name,
                _share(every),
                *by_length,
                f"{fmean(solution.calls for solution in every):.1f}",
                f"{fmean(len(solution.tree) - 1 for solution in every):.1f}",
            )
    console.print(table)


def _share(solutions: Sequence[Solution]) -> str:
    return f"{100 * fmean(solution.solved for solution in solutions):.0f}%"


async def _solve_all(
    task: Task, chosen: Sequence[dict[str, Any]], side: Side, decoder: LocalDecoder | None, nodes: int, seed: int
) -> list[Solution]:
    """All instances, some at once, in their order."""
    places = asyncio.Semaphore(_AT_ONCE)
    model: dict[str, Any] = {"model": None} if decoder is None else {"decoder": decoder}

    async def solve(row: dict[str, Any]) -> Solution:
        async with places:
            question = task.question_of(row)
            return await asolve(task, question, **model, **side.parts, budget=Budget(nodes=nodes), seed=seed)

    return list(await asyncio.gather(*map(solve, chosen)))
