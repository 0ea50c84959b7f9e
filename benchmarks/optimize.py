"""The benchmark `optimize`: searches for programs side by side, from the same start, with the same model and budget.

Each round is a seed. Lower scores are better. The scorer of the search rates its best program, and so does one with
other instances that the search has not seen: where a problem has `held_out.py`, it replaces `instances.py`. In
comparisons, a program that fails on these instances counts as the start.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any, ClassVar

from pydantic import Field
from rich.console import Console
from rich.table import Table

from benchmarks.engines import local_decoders, searched
from benchmarks.harness import Bench, BenchOptions, Cells, Measured
from benchmarks.ways import read_ways
from tot.config import SearchConfig
from tot.decoders.decoder import LocalDecoder
from tot.decoders.errors import OptionError
from tot.decoders.machine import describe
from tot.decoders.models.loading import resolve_device
from tot.evaluation.estimate import bootstrap
from tot.solution import Solution
from tot.tasks.optimize import REFERENCE, Optimize, held_out_of

SEEDED = 1000
"""Distance between the seeds of two rounds."""


class Options(BenchOptions):
    """Compare searches for programs: scores on the instances of the search and on others."""

    extends: ClassVar = "seeds"
    problems: tuple[str, ...] = Field(
        ("bin-packing", "traveling-salesman", "oscillator"),
        description="Comma-separated problems: names of shipped ones, or folders with score.py.",
    )
    way: list[str] = Field(
        [
            "best of n: search=best-of-n:samples=64",
            "ab-mcts: search=ab-mcts:iterations=64",
            "refine: search=refine:thoughts=9,depth=9",
        ],
        description="A way to search, as 'NAME: option=value; option=value', with options of tot solve. Repeat for "
        "more; each is compared with the first.",
    )
    seeds: int = Field(5, ge=1, description="Searches of each way, with different seeds.")


class Problem:
    """A folder with a problem: its task, and the scores of programs."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.task = Optimize(folder=folder, minimize=True)
        self.held_out = held_out_of(self.task, folder)

    def scores(self, program: str | None) -> dict[str, float | None]:
        """Return the scores of a program by the names of their columns; None for a program that fails."""
        scorers = {"score": self.task.scorer, "held out": self.held_out}
        return {name: scorer.score(program).score if scorer and program else None for name, scorer in scorers.items()}

    def known(self) -> dict[str, dict[str, float | None]]:
        """Return the scores of the problem's own programs."""
        paths = {"start": self.folder / "start.py", "reference": self.folder / REFERENCE}
        return {name: self.scores(path.read_text("utf-8")) for name, path in paths.items() if path.exists()}


def run(asked: Options, console: Console) -> None:
    """Run the benchmark and print a table for each problem. Raises OptionError for an unknown problem or way."""
    common = {"model": asked.model, "prefix_cache": False}
    configs = {name: SearchConfig.of(None, {**common, **way}) for name, way in read_ways(asked.way).items()}
    problems = {place: Problem(_folder(place)) for place in asked.problems}
    with ExitStack() as stack:
        bench = Bench(asked, console, describe(resolve_device("auto")))
        decoders = [decoder for config in configs.values() for decoder in local_decoders(config, stack)]
        for place, problem in problems.items():
            bench.compare(
                place,
                {name: partial(_searched, problem, config, decoders) for name, config in configs.items()},
                range(0, SEEDED * asked.seeds, SEEDED),
                partial(table, problem=problem, title=f"{place}, {asked.model}"),
            )


def _folder(problem: str) -> Path:
    """Return the folder of a problem: a path, or the name of one beside this module."""
    if (Path(problem) / "score.py").is_file():
        return Path(problem)
    shipped = Path(__file__).parent / "problems"
    names = sorted(one.name for one in shipped.iterdir() if (one / "score.py").is_file())
    if problem not in names:
        raise OptionError(f"unknown problem {problem!r}: choose {', '.join(names)}, or a folder with score.py")
    return shipped / problem


def _searched(problem: Problem, config: SearchConfig, decoders: Sequence[LocalDecoder], seed: int) -> Measured:
    task = problem.task
    seconds, solution = searched(decoders, task, task.example(), config.model_copy(update={"seed": seed}))
    return {"seconds": seconds, **described(problem, solution)}


def described(problem: Problem, solution: Solution) -> Measured:
    """Return the result of a search: its best program, the scores and the numbers of programs."""
    tree, task = solution.tree, problem.task
    nodes = [node for node in tree if node.parent is not None]
    lost = sum(node.rejected + node.merged + node.parse_failures for node in tree)
    failed = lost + sum(task.measured(tree.state(node)) is None for node in nodes)
    spent = {"tokens": solution.usage.new_tokens, "thoughts": len(nodes) + lost, "failed": failed}
    return {"program": solution.answer, **problem.scores(solution.answer), **spent}


def table(cells: Cells, problem: Problem, title: str) -> Table:
    """Build a table with one row per way, after the start and the reference, compared with the first way by seed."""
    ways = {name: cells.of(name) for name in cells.sides}
    first = next(iter(ways), "")
    head = ["seeds", "score", "held out", f"minus {first}", "better than the reference"]
    rows = Table("", *head, "thoughts", "failed", "new tokens", "seconds", title=title)
    known = problem.known()
    for name, scores in known.items():
        rows.add_row(name, "", *(_shown([score]) for score in scores.values()))
    compared = "held out" if problem.held_out else "score"
    start = known.get("start", {}).get(compared)
    reference = known.get("reference", {}).get(compared, start)

    def ratings(name: str) -> dict[int, float | None]:
        """Return the compared score by seed."""
        return {turn: start if cell[compared] is None else cell[compared] for turn, cell in ways[name].items()}

    for name, found in ways.items():
        rated, base = ratings(name), ratings(first)
        pairs = [(rating, base.get(turn)) for turn, rating in rated.items()]
        differences = [one - other for one, other in pairs if one is not None and other is not None]
        won = [one is not None and reference is not None and one < reference for one in rated.values()]
        thoughts, failed, tokens, seconds = (
            fmean(cell[key] for cell in found.values()) for key in ("thoughts", "failed", "tokens", "seconds")
        )
        rows.add_row(
            name,
            str(len(found)),
            _shown([cell["score"] for cell in found.values()]),
            _shown([cell["held out"] for cell in found.values()]),
            bootstrap(differences).format("+.3g") if name != first and differences else "",
            f"{sum(won)} of {len(won)}" if reference is not None else "",
            f"{thoughts:.0f}",
            f"{failed / thoughts:.0%}" if thoughts else "",
            f"{tokens:.0f}",
            f"{seconds:.0f}",
        )
    return rows


def _shown(scores: Sequence[Any]) -> str:
    """Return the mean of the scores, and the number of programs without one."""
    known = [score for score in scores if score is not None]
    failed = f" ({len(scores) - len(known)} failed)" if known and len(known) < len(scores) else ""
    return f"{fmean(known):.4g}{failed}" if known else ""
