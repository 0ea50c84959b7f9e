"""The benchmark `optimize`: searches for programs side by side, from the same start, with the same model and budget.

Each round is a seed. The scorer of the search rates its best program, and so does one with other instances that the
search has not seen: where a problem has `held_out.py`, it replaces `instances.py`. In comparisons, a program that fails
on these instances counts as the start.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from statistics import fmean
from typing import Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field
from rich.console import Console
from rich.table import Table

from benchmarks.engines import local_decoders, searched
from benchmarks.harness import Bench, BenchOptions, Cells, Measured, SideError
from benchmarks.peer_process import PeerProcess
from benchmarks.ways import read_ways
from tot.config import SearchConfig
from tot.decoders.decoder import LocalDecoder
from tot.decoders.errors import OptionError, validated
from tot.decoders.machine import describe
from tot.decoders.models.loading import resolve_device
from tot.evaluation.estimate import bootstrap
from tot.solution import Solution
from tot.tasks.optimize import REFERENCE, Optimize, held_out_of

SEEDED = 1000
"""Distance between the seeds of two rounds."""


class Options(BenchOptions):
    """Compare searches for programs: scores on the search's instances and on others, at equal thoughts and tokens."""

    extends: ClassVar = "seeds"
    problems: tuple[str, ...] = Field(
        ("bin-packing", "traveling-salesman", "sorting-network", "oscillator"),
        description="Comma-separated problems: names of shipped ones, or folders with score.py.",
    )
    maximize: bool = Field(False, description="Higher scores are better; they are costs for the shipped problems.")
    way: list[str] = Field(
        [
            "best of n: search=best-of-n:samples=64",
            "ab-mcts: search=ab-mcts:iterations=64",
            "refine: search=refine:thoughts=9,depth=9",
        ],
        description="A way to search, as 'NAME: option=value; option=value', with options of tot solve. Repeat for "
        "more; each is compared with the first. 'NAME: peer=openevolve; iterations=64' is OpenEvolve's loop.",
    )
    seeds: int = Field(5, ge=1, description="Searches of each way, with different seeds.")


class EvolvingWay(BaseModel):
    """OpenEvolve's loop. It has one process for each program that the searches write at the same time."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    peer: Literal["openevolve"]
    iterations: int = Field(64, ge=1)
    """Number of programs."""
    seconds: float | None = Field(None, gt=0)
    """Stop after this time."""


class Problem:
    """A folder with a problem: its task, and the scores of programs."""

    def __init__(self, folder: Path, minimize: bool) -> None:
        self.folder, self.minimize = folder, minimize
        self.task = Optimize(folder=folder, minimize=minimize)
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
    """Run the benchmark and print a table for each problem.

    Raises OptionError for an unknown problem or way, and SideError if OpenEvolve is not installed.
    """
    with ExitStack() as stack:
        bench = Bench(asked, console, describe(resolve_device("auto")))
        peers: dict[str, EvolvingWay] = {}
        configs: dict[str, SearchConfig] = {}
        for name, way in read_ways(asked.way).items():
            if "peer" in way:
                peers[name] = validated(EvolvingWay, way, f"--way {name}")
            else:
                configs[name] = SearchConfig.of(None, {"model": asked.model, "prefix_cache": False, **way})
        if peers and not find_spec("openevolve"):
            raise SideError("OpenEvolve is not installed: pip install openevolve")
        decoders = [decoder for config in configs.values() for decoder in local_decoders(config, stack)]
        parallel = max((decoder.cheap_samples for decoder in decoders), default=8) if peers else 0
        for place in asked.problems:
            problem = Problem(_folder(place), not asked.maximize)
            sides: dict[str, Any] = {}
            for name in read_ways(asked.way):
                if name in peers:
                    load = {"model": asked.model, "parallel": parallel, **peers[name].model_dump()}
                    sides[name] = partial(_evolved, problem, load)
                else:
                    sides[name] = partial(_searched, problem, configs[name], decoders)
            bench.compare(
                place,
                sides,
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


def _evolved(problem: Problem, load: dict[str, Any], seed: int) -> Measured:
    """Run OpenEvolve in its own process, with the model behind `tot serve`. The seconds begin when all of them run."""
    load |= {"folder": str(problem.folder.absolute()), "minimize": problem.minimize}
    patience = max(3600.0, 2 * (load["seconds"] or 0))
    process = PeerProcess(Path(sys.executable), "openevolve_worker.py", load, patience=patience)
    try:
        found = process.ask({"seed": seed})
    finally:
        process.close()
    return found | problem.scores(found["program"]) | {"curve": []}


def described(problem: Problem, solution: Solution) -> Measured:
    """Return the result of a search: its best program, the scores, and the best score by new tokens."""
    tree, task = solution.tree, problem.task
    nodes = [node for node in tree if node.parent is not None]
    best = task.measured(tree.state(tree.root))
    curve, tokens, failed = [[0, best]], 0, sum(node.rejected + node.merged + node.parse_failures for node in tree)
    thoughts = len(nodes) + failed
    for node in nodes:
        value = task.measured(tree.state(node))
        tokens += node.usage.new_tokens
        failed += value is None
        if value is not None and (best is None or value > best):
            best = value
            curve.append([tokens, value])
    spent = {"tokens": solution.usage.new_tokens, "thoughts": thoughts, "failed": failed}
    return {"program": solution.answer, **problem.scores(solution.answer), "curve": curve, **spent}


def table(cells: Cells, problem: Problem, title: str) -> Table:
    """Build a table with one row per way, after the start and the reference, compared with the first way by seed."""
    ways = {name: list(cells.of(name).items()) for name in cells.sides}
    first = next(iter(ways), "")
    head = ["seeds", "score", "held out", f"minus {first}", "better than the reference", "at equal tokens"]
    better = "lower" if problem.minimize else "higher"
    rows = Table("", *head, "thoughts", "failed", "new tokens", "seconds", title=f"{title}; {better} is better")
    known, sign = problem.known(), -1 if problem.minimize else 1
    for name, scores in known.items():
        rows.add_row(name, "", *(_shown([score]) for score in scores.values()))
    compared = "held out" if problem.held_out else "score"
    start = known.get("start", {}).get(compared)
    reference = known.get("reference", {}).get(compared, start)
    ratings = {
        name: {turn: start if cell[compared] is None else cell[compared] for turn, cell in found}
        for name, found in ways.items()
    }
    for name, found in ways.items():
        rated, base = ratings[name], ratings[first]
        pairs = [(rating, base.get(turn)) for turn, rating in rated.items()]
        differences = [one - other for one, other in pairs if one is not None and other is not None]
        won = [one is not None and reference is not None and sign * one > sign * reference for one in rated.values()]
        equal = [
            _at(cell["curve"], min(dict(other)[turn]["tokens"] for other in ways.values() if turn in dict(other)), sign)
            for turn, cell in found
        ]

        def mean(key: str, cells: Sequence[Any] = found) -> float:
            return fmean(cell[key] for _, cell in cells)

        rows.add_row(
            name,
            str(len(found)),
            _shown([cell["score"] for _, cell in found]),
            _shown([cell["held out"] for _, cell in found]),
            bootstrap(differences).format("+.3g") if name != first and differences else "",
            f"{sum(won)} of {len(won)}" if reference is not None else "",
            _shown(equal),
            f"{mean('thoughts'):.0f}",
            f"{mean('failed') / mean('thoughts'):.0%}" if mean("thoughts") else "",
            f"{mean('tokens'):.0f}",
            f"{mean('seconds'):.0f}",
        )
    return rows


def _at(curve: Sequence[Sequence[float]], tokens: int, sign: int) -> float | None:
    """Return the best score within this number of new tokens; None if no program worked."""
    found = [value for spent, value in curve if spent <= tokens and value is not None]
    return sign * found[-1] if found else None


def _shown(scores: Sequence[Any]) -> str:
    """Return the mean of the scores, and the number of programs without one."""
    known = [score for score in scores if score is not None]
    failed = f" ({len(scores) - len(known)} failed)" if known and len(known) < len(scores) else ""
    return f"{fmean(known):.4g}{failed}" if known else ""
