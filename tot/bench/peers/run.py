"""`tot bench peers`: our decoder beside transformers, llama.cpp and vLLM: branches of a prompt, and whole searches.

Same weights, same prompts, same numbers of new tokens, prefill counted on all sides, which take turns. Peers that are
not installed are left out; what a side fails at is told, and the others go on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from tot.bench.machine import spread
from tot.bench.packed import few_shot_ids
from tot.bench.peers import answers, evaluations, limit, tables
from tot.bench.peers.goals import DYNAMIC, INT8, INT8_LEAST, Goal, decode_goals, tree_goals
from tot.bench.peers.here import Tot
from tot.bench.peers.side import Side
from tot.bench.peers.sides import Plan, open_exact, open_sides
from tot.bench.peers.turns import NOT_AT_ALL, Results, Turns
from tot.bench.peers.workloads import BREADTH, DEPTH, decode, questions_of, rotated, searchers, trees
from tot.decoders.errors import OptionError, unknown
from tot.decoders.files import write_json
from tot.machine import describe
from tot.registry import load_task

PARTS = ("decode", "limit", "tree", "evaluations", "answers")
_LIMIT_COUNTS = (15, 32)
_INT8_COUNTS = (1, 4, 8)
_LIMIT_PLACE = 700
"""What prompts are rotated by where steps are measured: by more than anywhere else."""


@dataclass(frozen=True)
class Options:
    """What is asked for. `patience` is in seconds."""

    plan: Plan = field(default_factory=Plan)
    branches: Sequence[int] = (1, 3, 5, 15, 32, 64)
    rounds: int = 3
    new_tokens: int = 64
    thoughts: Sequence[int] = (3, 5)
    problems: int = 8
    data: Path | None = None
    patience: float = 60.0
    parts: Sequence[str] = PARTS
    out: Path | None = None
    markdown: bool = False


@dataclass
class Found:
    """All that was measured, as it comes in."""

    sides: list[Side] = field(default_factory=list)
    machine: str = ""
    prompt: int = 0
    """Tokens of the prompt that is branched from."""
    problems: int = 0
    decode: Results | None = None
    tree: Results | None = None
    solve: dict[int, list[float]] = field(default_factory=dict)
    """Seconds of our own `solve()`, by number of thoughts."""
    limit: dict[str, Any] = field(default_factory=dict)
    shares: list[Goal] = field(default_factory=list)
    evaluations: dict[str, list[float]] = field(default_factory=dict)
    answers: list[Goal] = field(default_factory=list)

    def goals(self) -> Iterator[Goal]:
        """All that can be judged by now."""
        if self.decode is not None:
            yield from decode_goals(self.decode)
        if self.tree is not None:
            yield from tree_goals(self.tree)
        if self.evaluations:
            yield evaluations.goal(self.evaluations)
        yield from self.shares
        yield from self.answers


def run(options: Options, console: Console) -> None:
    """Measure, print the tables, write the numbers. Ctrl-C ends it with what is known by then.

    Raises OptionError for parts, sides and data that there are none of, ModelError where our own side can't load.
    """
    for part in options.parts:
        if part not in PARTS:
            raise OptionError(unknown("part", part, PARTS))
    found = Found()

    def say(text: str) -> None:
        console.print(text, style="dim")

    with ExitStack() as stack:
        try:
            measure(options, found, stack, say)
        except KeyboardInterrupt:
            say("interrupted: what follows is what was measured by then")
        report(options, found, console)


def measure(options: Options, found: Found, stack: ExitStack, say: Callable[[str], None]) -> None:
    """Part by part; `found` has at any time what was measured by then."""
    task = load_task("gsm8k")
    questions = questions_of(task, options.data, options.problems)
    found.problems = len(questions)
    found.sides = open_sides(options.plan, stack, say)
    ours = found.sides[0]
    assert isinstance(ours, Tot)
    loaded = ours.decoder.engine.loaded
    found.machine = describe(loaded.device, loaded.dtype)
    ids = few_shot_ids(ours.decoder.tokenizer)
    found.prompt = len(ids)
    if "decode" in options.parts:
        turns = Turns(found.sides, options.branches, options.patience, say)
        found.decode = turns.results
        decode(turns, ids, options.new_tokens, options.rounds, say)
    if "limit" in options.parts:
        say("bandwidth, matrix products, steps …")
        prompts = [rotated(ids, _LIMIT_PLACE + turn) for turn in range(options.rounds)]
        counts = [count for count in options.branches if count in _LIMIT_COUNTS] or [max(options.branches)]
        found.shares = limit.shares(ours, prompts, counts, found.limit)
        for side in found.sides:
            if isinstance(side, Tot) and side.name in (INT8, DYNAMIC):
                found.shares += limit.quicker(ours, side, prompts, _INT8_COUNTS, INT8_LEAST)
    if "tree" in options.parts:
        turns = Turns(searchers(found.sides, found.decode), options.thoughts, options.patience, say)
        found.tree = turns.results
        trees(turns, ours, task, questions, found.solve, say)
    if "evaluations" in options.parts:
        asked = [questions[turn % len(questions)] for turn in range(options.rounds + 1)]
        found.evaluations = evaluations.speeds(options.plan.model, options.plan.dtype, task, asked, say)
    packed = [side for side in found.sides if isinstance(side, Tot) and side is not ours]
    if "answers" in options.parts and packed:
        controls = [] if loaded.dtype == torch.float32 else open_exact(options.plan, stack, say)
        some = questions_of(task, options.data, answers.MOST)
        found.answers = answers.same(ours, packed, task, some, say, controls)


def report(options: Options, found: Found, console: Console) -> None:
    """The tables, what they leave out and why, and the numbers in a file."""
    for table in made(options, found):
        tables.show(console, table, options.markdown)
    for line in remarks(options, found):
        console.print(line)
    if options.out is not None:
        write_json(options.out, numbers(options, found))


def made(options: Options, found: Found) -> Iterator[Table]:
    """The tables of what was measured."""
    if found.decode is not None:
        title = (
            f"{options.plan.model}: new tokens/s, {options.new_tokens} each after {found.prompt} tokens, by branches"
        )
        yield tables.of_results(title, found.decode, found.sides, options.rounds)
    if found.tree is not None:
        title = f"seconds a GSM8K search, T = {DEPTH}, b = {BREADTH}, {found.problems} problems"
        table = tables.of_results(title, found.tree, found.sides, found.problems, "n = ", seconds=True)
        seconds = [spread(found.solve[count]) if found.solve.get(count) else "" for count in found.tree.columns]
        table.add_row("(solve() with tot)", *seconds)
        yield table
    goals = list(found.goals())
    if goals:
        yield tables.of_goals(goals)


def remarks(options: Options, found: Found) -> Iterator[str]:
    """What ran on what, the rule for what was left out, and what failed."""
    yield found.machine
    for side in found.sides:
        yield f"{side.name}: {side.about}"
    yield (
        f"Medians (and ranges) of rounds; what was predicted to take more than {options.patience:g} s was done once, "
        f"and nothing that was predicted to take more than {NOT_AT_ALL * options.patience:g} s."
    )
    if found.tree is not None:
        yield "In a search, the others read one token for an evaluation, where tot scores all choices."
    if found.limit:
        size, bandwidth, rate = (found.limit[key] for key in ("weight_bytes", "read_bandwidth", "matrix_rate"))
        yield f"Limit: {size / 1e6:.0f} MB of weights, read at {bandwidth / 1e9:.1f} GB/s; {rate / 1e9:.0f} GFLOP/s."
    for results in (found.decode, found.tree):
        for name, why in results.failed.items() if results is not None else ():
            yield f"{name} failed: {why}"


def numbers(options: Options, found: Found) -> dict[str, Any]:
    """All that was measured, as JSON data."""
    asked = asdict(options)
    return {
        "machine": found.machine,
        "options": {
            **asked,
            "plan": {key: str(value) for key, value in asked["plan"].items()},
            "data": str(asked["data"]),
        }
        | {"out": str(asked["out"])},
        "sides": {side.name: side.about for side in found.sides},
        "decode": None if found.decode is None else asdict(found.decode),
        "tree": None if found.tree is None else asdict(found.tree),
        "solve": found.solve,
        "limit": found.limit,
        "evaluations": found.evaluations,
        "goals": [
            {**asdict(goal), "ratios": list(goal.ratios), "ratio": goal.ratio, "verdict": goal.verdict}
            for goal in found.goals()
        ],
    }
