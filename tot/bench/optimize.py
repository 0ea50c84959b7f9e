"""`tot bench optimize`: searches for programs side by side, from the same start, with the same model and budget.

Each round is a seed. The scorer of the search rates its best program, and so does one with other instances that the
search has not seen: where a problem has `held_out.py`, it replaces `instances.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from importlib.resources import as_file
from importlib.resources import files as resources
from pathlib import Path
from statistics import fmean
from typing import Any

from rich.console import Console
from rich.table import Table

from tot.bench.engines import forget
from tot.bench.harness import Bench, Measured, Measurements, Side, timed
from tot.bench.options import OptimizeOptions, read_ways
from tot.config import SearchConfig
from tot.decoders.decoder import LocalDecoder
from tot.decoders.errors import OptionError
from tot.decoders.machine import describe
from tot.decoders.models.loading import resolve_device
from tot.evaluation.estimate import bootstrap
from tot.registry import load_task
from tot.running import run_to_end
from tot.solver import Solution, asolve
from tot.tasks.optimize import HELD_OUT, INSTANCES, REFERENCE, Optimize
from tot.tasks.scorer import Scorer

SEEDED = 1000
"""Distance between the seeds of two rounds."""


def run(asked: OptimizeOptions, console: Console) -> None:
    """Run the benchmark and print a table for each problem. Raises OptionError for an unknown problem or way."""
    ways = read_ways(asked.way)
    with ExitStack() as stack:
        bench = stack.enter_context(Bench(asked, console, describe(resolve_device("auto")), extend=True))
        configs = {
            name: SearchConfig.of(None, {"model": asked.model, "prefix_cache": False, **way})
            for name, way in ways.items()
        }
        decoders: list[LocalDecoder] = []
        for config in configs.values():
            opened = config.open(stack).values()
            decoders += [one for one in opened if isinstance(one, LocalDecoder)]
        for problem in asked.problems:
            folder = _folder(problem, stack)
            task = load_task(f"optimize:folder={folder},minimize={str(not asked.maximize).lower()}")
            assert isinstance(task, Optimize)
            held_out = held_out_of(task, folder)
            sides = [
                Side(name, partial(_searched, task, held_out, config, decoders)) for name, config in configs.items()
            ]
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
    """Search with an empty cache. The models stay open."""
    for decoder in decoders:
        forget(decoder)
    seeded = config.model_copy(update={"seed": seed})
    seconds, solution = timed(lambda: run_to_end(asolve(task, task.example(), seeded)))
    return {"seconds": seconds, **described(task, held_out, solution)}


def described(task: Optimize, held_out: Scorer | None, solution: Solution) -> Measured:
    """Return the result of a search: its best program, the scores, and the best score by new tokens."""
    tree = solution.tree
    nodes = [node for node in tree if node.parent is not None]
    best = task.measured(tree.state(tree.root))
    curve, tokens, failed = [[0, best]], 0, 0
    for node in nodes:
        value = task.measured(tree.state(node))
        tokens += node.new_tokens
        failed += value is None
        if value is not None and (best is None or value > best):
            best = value
            curve.append([tokens, value])
    rejected = sum(node.rejected + node.merged + node.parse_failures for node in tree)
    return {
        "program": solution.answer,
        "score": _score(task.scorer, solution.answer),
        "held out": _score(held_out, solution.answer),
        "curve": curve,
        "tokens": solution.usage.new_tokens,
        "thoughts": len(nodes) + rejected,
        "failed": failed + rejected,
    }


def held_out_of(task: Optimize, folder: Path) -> Scorer | None:
    """Return the task's scorer with other instances; None if the folder has none."""
    path, scorer = folder / HELD_OUT, task.scorer
    if not path.exists():
        return None
    files = {**scorer.files, INSTANCES: path.read_text("utf-8")}
    return Scorer(scorer.source, files, scorer.weights, 6 * scorer.seconds, scorer.repeats)


def _score(scorer: Scorer | None, program: str | None) -> float | None:
    return None if scorer is None or program is None else scorer.score(program).score


def table(results: Measurements, task: Optimize, held_out: Scorer | None, folder: Path, title: str) -> Table:
    """Build a table with one row per way, after the start and the reference, compared with the first way by seed."""
    ways = {name: results.of(name) for name in results.sides}
    first = next(iter(ways.values()), {})
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
    reference = None
    for path, name in ((folder / "start.py", "start"), (folder / REFERENCE, "reference")):
        if path.exists():
            program = path.read_text("utf-8")
            scores = [_score(scorer, program) for scorer in (task.scorer, held_out)]
            reference = scores[-1] if scores[-1] is not None else scores[0]
            rows.add_row(name, "", *(_shown([score]) for score in scores))
    for name, cells in ways.items():
        key = "score" if held_out is None else "held out"
        pairs = [(cell, first[turn]) for turn, cell in cells.items() if turn in first]
        differences = [a[key] - b[key] for a, b in pairs if None not in (a[key], b[key])]
        common = {turn: min(one[turn]["tokens"] for one in ways.values() if turn in one) for turn in cells}
        sign = -1 if task.options.minimize else 1
        won = [sign * cell[key] > sign * reference for cell in cells.values() if reference is not None and cell[key]]
        equal = [_at(cell["curve"], common[turn], sign) for turn, cell in cells.items()]
        rows.add_row(
            name,
            str(len(cells)),
            _shown([cell["score"] for cell in cells.values()]),
            _shown([cell["held out"] for cell in cells.values()]),
            bootstrap(differences).format("+.3g") if cells is not first and differences else "",
            f"{sum(won)} of {len(won)}" if reference is not None else "",
            _shown(equal),
            f"{fmean(cell['thoughts'] for cell in cells.values()):.0f}",
            f"{sum(cell['failed'] for cell in cells.values()) / sum(cell['thoughts'] for cell in cells.values()):.0%}",
            f"{fmean(cell['tokens'] for cell in cells.values()):.0f}",
            f"{fmean(cell['seconds'] for cell in cells.values()):.0f}",
        )
    return rows


def _at(curve: Sequence[Sequence[float]], tokens: int, sign: int) -> float | None:
    """Return the best score within this number of new tokens; None if no program worked."""
    found = [value for spent, value in curve if spent <= tokens and value is not None]
    return sign * found[-1] if found else None


def _shown(scores: Sequence[Any]) -> str:
    known = [score for score in scores if score is not None]
    return f"{fmean(known):.4g}" if known else ""
