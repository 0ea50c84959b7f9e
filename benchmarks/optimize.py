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
from importlib.resources import as_file
from importlib.resources import files as resources
from importlib.util import find_spec
from pathlib import Path
from statistics import fmean
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field
from rich.console import Console
from rich.table import Table

from benchmarks.engines import SideError, local_decoders, searched
from benchmarks.harness import Bench, Measured, Measurements, Side
from benchmarks.options import OptimizeOptions, read_ways
from benchmarks.peers.worker import PeerWorker
from tot.config import SearchConfig
from tot.decoders.decoder import LocalDecoder
from tot.decoders.errors import OptionError, validated
from tot.decoders.machine import describe
from tot.decoders.models.loading import resolve_device
from tot.evaluation.estimate import bootstrap
from tot.solution import Solution
from tot.tasks.optimize import REFERENCE, Optimize, held_out_of
from tot.tasks.scorer import Scorer

SEEDED = 1000
"""Distance between the seeds of two rounds."""
_WORKER = Path(__file__).parent / "peers" / "openevolve_worker.py"


class EvolvingWay(BaseModel):
    """OpenEvolve's loop. It has one process for each program that the searches write at the same time."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    peer: Literal["openevolve"]
    iterations: int = Field(64, ge=1)
    """Number of programs."""
    seconds: float | None = Field(None, gt=0)
    """Stop after this time."""


def run(asked: OptimizeOptions, console: Console) -> None:
    """Run the benchmark and print a table for each problem.

    Raises OptionError for an unknown problem or way, and SideError if OpenEvolve is not installed or fails.
    """
    ways = read_ways(asked.way)
    with ExitStack() as stack:
        bench = Bench(asked, console, describe(resolve_device("auto")))
        peers = {name: validated(EvolvingWay, way, f"--way {name}") for name, way in ways.items() if "peer" in way}
        if peers and not find_spec("openevolve"):
            raise SideError("OpenEvolve is not installed: pip install openevolve")
        configs = {
            name: SearchConfig.of(None, {"model": asked.model, "prefix_cache": False, **way})
            for name, way in ways.items()
            if name not in peers
        }
        decoders: list[LocalDecoder] = []
        for config in configs.values():
            decoders += local_decoders(config, stack)
        parallel = max((decoder.cheap_samples for decoder in decoders), default=8) if peers else 0
        for problem in asked.problems:
            folder = _folder(problem, stack)
            task = Optimize(folder=folder, minimize=not asked.maximize)
            held_out = held_out_of(task, folder)
            load = {"model": asked.model, "folder": str(folder.absolute()), "minimize": not asked.maximize}
            evolved = {
                name: partial(_evolved, task, held_out, load | way.model_dump() | {"parallel": parallel})
                for name, way in peers.items()
            }
            searched = {name: partial(_searched, task, held_out, one, decoders) for name, one in configs.items()}
            sides = [Side(name, (searched | evolved)[name]) for name in ways]
            bench.compare(
                problem,
                sides,
                lambda _, turn: SEEDED * turn,
                rounds=asked.seeds,
                table=partial(table, task=task, held_out=held_out, folder=folder, title=f"{problem}, {asked.model}"),
            )


def _folder(problem: str, stack: ExitStack) -> Path:
    """Return the folder of a problem: a path, or the name of a shipped one."""
    if (Path(problem) / "score.py").is_file():
        return Path(problem)
    shipped = resources("tot.tasks") / "problems"
    names = sorted(one.name for one in shipped.iterdir() if (one / "score.py").is_file())
    if problem not in names:
        raise OptionError(f"unknown problem {problem!r}: choose {', '.join(names)}, or a folder with score.py")
    return stack.enter_context(as_file(shipped / problem))


def _searched(
    task: Optimize, held_out: Scorer | None, config: SearchConfig, decoders: Sequence[LocalDecoder], seed: int
) -> Measured:
    seconds, solution = searched(decoders, task, task.example(), config.model_copy(update={"seed": seed}))
    return {"seconds": seconds, **described(task, held_out, solution)}


def _evolved(task: Optimize, held_out: Scorer | None, load: dict[str, Any], seed: int) -> Measured:
    """Run OpenEvolve in its own process, with the model behind `tot serve`. The seconds begin when all of them run."""
    worker = PeerWorker(Path(sys.executable), _WORKER, load, patience=max(3600.0, 2 * (load["seconds"] or 0)))
    try:
        found = worker.evolve(seed)
    finally:
        worker.close()
    return found | _scores(task, held_out, found["program"]) | {"curve": []}


def described(task: Optimize, held_out: Scorer | None, solution: Solution) -> Measured:
    """Return the result of a search: its best program, the scores, and the best score by new tokens."""
    tree = solution.tree
    nodes = [node for node in tree if node.parent is not None]
    best = task.measured(tree.state(tree.root))
    curve, tokens, failed = [[0, best]], 0, 0
    for node in nodes:
        value = task.measured(tree.state(node))
        tokens += node.usage.new_tokens
        failed += value is None
        if value is not None and (best is None or value > best):
            best = value
            curve.append([tokens, value])
    rejected = sum(node.rejected + node.merged + node.parse_failures for node in tree)
    return {
        "program": solution.answer,
        **_scores(task, held_out, solution.answer),
        "curve": curve,
        "tokens": solution.usage.new_tokens,
        "thoughts": len(nodes) + rejected,
        "failed": failed + rejected,
    }


def _scores(task: Optimize, held_out: Scorer | None, program: str | None) -> dict[str, float | None]:
    """Return the scores of a program by the names of their columns; None for a program that fails."""
    scorers = {"score": task.scorer, "held out": held_out}
    return {name: scorer.score(program).score if scorer and program else None for name, scorer in scorers.items()}


def table(results: Measurements, task: Optimize, held_out: Scorer | None, folder: Path, title: str) -> Table:
    """Build a table with one row per way, after the start and the reference, compared with the first way by seed."""
    ways = {name: results.of(name) for name in results.sides}
    better = "lower" if task.options.minimize else "higher"
    head = [
        "seeds",
        "score",
        "held out",
        f"minus {next(iter(ways), '')}",
        "better than the reference",
        "at equal tokens",
    ]
    rows = Table("", *head, "thoughts", "failed", "new tokens", "seconds", title=f"{title}; {better} is better")
    files = {"start": folder / "start.py", "reference": folder / REFERENCE}
    known = {name: _scores(task, held_out, path.read_text("utf-8")) for name, path in files.items() if path.exists()}
    for name, scores in known.items():
        rows.add_row(name, "", *(_shown([score]) for score in scores.values()))
    compared = "held out" if held_out else "score"
    start, reference = (known[name][compared] if name in known else None for name in files)
    reference = reference if "reference" in known else start
    ratings = {
        name: {turn: start if cell[compared] is None else cell[compared] for turn, cell in cells.items()}
        for name, cells in ways.items()
    }
    base = next(iter(ratings.values()), {})
    for name, cells in ways.items():
        rated = ratings[name]
        pairs = [(rating, base.get(turn)) for turn, rating in rated.items()]
        differences = [one - other for one, other in pairs if one is not None and other is not None]
        common = {turn: min(one[turn]["tokens"] for one in ways.values() if turn in one) for turn in cells}
        sign = -1 if task.options.minimize else 1
        won = [
            rating is not None and reference is not None and sign * rating > sign * reference
            for rating in rated.values()
        ]
        thoughts = sum(cell["thoughts"] for cell in cells.values())
        equal = [_at(cell["curve"], common[turn], sign) for turn, cell in cells.items()]
        rows.add_row(
            name,
            str(len(cells)),
            _shown([cell["score"] for cell in cells.values()]),
            _shown([cell["held out"] for cell in cells.values()]),
            bootstrap(differences).format("+.3g") if rated is not base and differences else "",
            f"{sum(won)} of {len(won)}" if reference is not None else "",
            _shown(equal),
            f"{thoughts / len(cells):.0f}",
            f"{sum(cell['failed'] for cell in cells.values()) / thoughts:.0%}" if thoughts else "",
            f"{fmean(cell['tokens'] for cell in cells.values()):.0f}",
            f"{fmean(cell['seconds'] for cell in cells.values()):.0f}",
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
