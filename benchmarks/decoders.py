"""The benchmark `decoders`: whole tree-of-thought searches with each decoding method, as in SEED's tables (section 5).

The searches follow the paper, with few-shot prompts of our own: n thoughts per state, the best of which is expanded, to
the task's depth, and a state evaluator that explains its value. Stop strings and end-of-text tokens apply. All sides
take turns at each question. Their caches start with the prompts of a task's first question. Serial sides
decode one sample at a time. In float32, sides without a rejection rule write equal texts.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

from pydantic import Field
from rich.console import Console
from rich.table import Table

from benchmarks.engines import about, forget, timed_parts
from benchmarks.harness import RATE, Bench, BenchOptions, Cells, Measured, Metric, percent, timed, times
from tot.api import asolve
from tot.decoders.decoder import LocalDecoder, load_decoder
from tot.decoders.errors import OptionError
from tot.decoders.request import Completion, Message, Purpose, Request, Sampling, Usage
from tot.evaluation.data import rows
from tot.evaluators.likelihood import Explain
from tot.generators.sample import Sample
from tot.registry import load_task
from tot.running import run_to_end
from tot.search.bfs import BFS
from tot.task.checked import CheckedTask
from tot.task.task import Task
from tot.tree.thought import Thought

SERIAL, PACKED = "ar, serial", "ar, packed"
PURPOSES: dict[Purpose, str] = {"generate": "thoughts", "evaluate": "evaluations"}
_EVERY: tuple[Purpose, ...] = ("generate", "evaluate", "answer")
_THOUGHTS = 3
"""Thoughts per state (n)."""
KConfig = Annotated[str, Field(pattern=r"^[1-9]\d?(-[1-9]\d?){0,15}$")]
Part = Literal["serial", "rounds", "packed"]


class Options(BenchOptions):
    """Compare decoding methods on whole searches, as in SEED's tables: serial, in rounds and packed."""

    extends: ClassVar = "limit"
    questions: list[str] = Field(
        ["gsm8k", "creative_writing", "blocksworld"],
        description="TASK=FILE, or TASK for the task's own questions. Repeat for more.",
    )
    limit: int = Field(10, ge=1, description="Questions per task.")
    draft: str = Field("lookup", description="Draft source, as for the decoder option draft of tot solve.")
    k_configs: tuple[KConfig, ...] = Field(
        ("1-1-1", "2-1-1", "2-2-1", "4-2-1"),
        description="Comma-separated draft trees: candidates at each position, such as 2-2-1.",
    )
    parts: tuple[Part, ...] = Field(
        ("serial", "rounds", "packed"), description="How texts are decoded: serial, rounds, packed; comma-separated."
    )
    temperatures: tuple[float, ...] = Field(
        (0.2, 1.0), description="Comma-separated temperatures of thoughts and evaluations."
    )


class Way(NamedTuple):
    """A decoding method, its options, and how texts are decoded together."""

    method: str
    options: dict[str, Any]
    part: Part


def ways(k_configs: Sequence[str], parts: Sequence[str] = ("serial", "rounds", "packed")) -> dict[str, Way]:
    """Return the sides of the given parts, by name.

    Drafts of each `k_config` are verified serially (the paper's baselines), in rounds (the paper's schedule) and packed
    (only drafts that pay). The first chain and the first tree also run with the papers' acceptance rules, serially and
    in rounds, and the first `k_config` in rounds also with overlap.
    """
    sides = {SERIAL: Way("ar", {}, "serial"), PACKED: Way("ar", {}, "packed")}
    rules: set[str] = set()
    for text in k_configs:
        config, label = tuple(map(int, text.split("-"))), text.replace("-", ",")
        chain = max(config) == 1
        method, rule = ("sd", "leviathan") if chain else ("mcsd", "mcsd")
        options: dict[str, Any] = {"k": len(config)} if chain else {"k_config": config}
        rounds = {"policy": "rounds", "k_config": config, "adapt": False}
        sides[f"{method} ({label}), serial"] = Way(method, options, "serial")
        sides[f"seed ({label}), rounds"] = Way("seed", rounds, "rounds")
        if rule not in rules:
            sides[f"{method} ({label}), {rule}'s rule, serial"] = Way(method, {**options, "rule": rule}, "serial")
            sides[f"seed ({label}), {rule}'s rule, rounds"] = Way("seed", {**rounds, "rule": rule}, "rounds")
            rules.add(rule)
        if text == k_configs[0]:
            sides[f"seed ({label}), rounds, overlap"] = Way("seed", {**rounds, "overlap": True}, "rounds")
    sides["seed, packed"] = Way("seed", {}, "packed")
    return {name: way for name, way in sides.items() if way.part in parts or name == PACKED}


@dataclass
class Watched:
    """A decoder that counts the usage by purpose. If `serial`, it decodes one sample at a time."""

    decoder: LocalDecoder
    serial: bool = False
    usage: dict[Purpose, Usage] = field(default_factory=lambda: dict.fromkeys(_EVERY, Usage()))

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        samples = [_alone(request, i) for request in requests for i in range(request.sampling.n)]
        batches = [[one] for one in samples] if self.serial else [samples]
        done = [one for batch in batches for one in self.decoder.generate(batch)]
        self.usage[requests[0].purpose] += sum((one.usage for one in done), Usage())
        return done


def _alone(request: Request, i: int) -> Request:
    """Return the request of sample i with its own seed: it has the same text alone and in a batch."""
    sampling = request.sampling.model_copy(update={"n": 1, "seed": request.sampling.seed ^ i})
    return request.model_copy(update={"sampling": sampling})


def first_prompts(task: Task, question: str) -> list[tuple[Message, ...]]:
    """Return the first prompts of a question's thoughts and evaluations."""
    state = task.start(question)
    thought = state.then(Thought(parts=dict.fromkeys(task.thought, "-")))
    return [task.prompt(task.thought[0], state), Explain().prompt(task, thought)]


def search(
    decoder: LocalDecoder, serial: bool, temperature: float, prompts: Sequence[tuple[Message, ...]], work: Sequence[Any]
) -> Measured:
    """Search with `prompts` in the caches. Return the tokens, the drafts and the seconds of the target.

    `work` has the task, the question and the seed.
    """
    watched, (task, question, seed) = Watched(decoder, serial), work
    options: dict[str, Any] = {
        "search": BFS(thoughts=_THOUGHTS, breadth=1, depth=task.depth),
        "generator": Sample(temperature=temperature),
        "evaluator": Explain(temperature=temperature),
    }
    forget(decoder)
    decoder.generate([Request(prompt=prompt, sampling=Sampling(max_tokens=4)) for prompt in prompts])
    with timed_parts(decoder.engine) as timeline:
        solving = asolve(task, question, decoder=watched, prompts="papers", seed=seed, **options)
        seconds, _ = timed(lambda: run_to_end(solving))
    counts = {
        name: [getattr(usage, name) for usage in watched.usage.values()] for name in ("drafted", "reached", "accepted")
    }
    tokens = sum(usage.new_tokens for usage in watched.usage.values())
    return {"seconds": seconds, "tokens": tokens, "verified": timeline.seconds()["verify"], **counts}


def run(asked: Options, console: Console) -> None:
    """Run the benchmark and print the tables. Raises OptionError for a file without questions."""
    tasks: dict[str, tuple[Task, list[str]]] = {}
    for text in asked.questions:
        name, _, file = text.partition("=")
        task = load_task(name)
        found = rows(Path(file)) if file else task.prompts.data("questions")
        texts = [CheckedTask(task).question_of(row) for row in itertools.islice(found, asked.limit)]
        if not texts:
            raise OptionError(f"{file} has no rows: give a file with questions")
        tasks[name] = task, texts
    with ExitStack() as stack:
        plain = stack.enter_context(load_decoder("ar", asked.model, prefix_cache=False))
        bench = Bench(asked, console, f"{asked.model}, drafts by {asked.draft}; {about(plain.engine)}")

        def side(way: Way, temperature: float) -> Callable[[Any], Measured]:
            """Build a side with one decoder per task: statistics learned on one task do not apply to another."""
            options = way.options if way.method == "ar" else {"draft": asked.draft, **way.options}
            searches = {}
            for name, (task, texts) in tasks.items():
                decoder = stack.enter_context(load_decoder(way.method, engine=plain.engine, **options))
                prompts = first_prompts(task, texts[0])
                searches[name] = partial(search, decoder, way.part == "serial", temperature, prompts)
            return lambda work: searches[work[0]](work[1:])

        for temperature in asked.temperatures:
            cells = bench.compare(
                f"searches, T = {temperature}",
                {name: side(way, temperature) for name, way in ways(asked.k_configs, asked.parts).items()},
                lambda name, turn: (name, tasks[name][0], tasks[name][1][turn % len(tasks[name][1])], turn),
                partial(_speeds, title=f"new tokens/s, T = {temperature}"),
                columns=list(tasks),
                rounds=asked.limit,
            )
            bench.show(_by_purpose(cells))


# -- tables -------------------------------------------------------------------------------------------------------


def _speeds(cells: Cells, title: str) -> Table:
    """SEED, table 1: one row per side; per task, tokens/s and the speedups over serial and packed `ar`."""
    heads = ("tokens/s", *(f"of {base}" for base in (SERIAL, PACKED)))
    named = [f"{name}: {head}" for name in cells.columns for head in heads]
    table = Table("", *named, "acceptance", "target at work", title=title)
    for side in cells.sides:
        row = []
        for column in cells.columns:
            speeds = [times(cells.ratios(RATE, side, base, column)) for base in (SERIAL, PACKED)]
            row += [RATE.show(cells.values(RATE, side, column)), *speeds]
        for metric in (_accepted(_EVERY), _TARGET):
            values = [value for column in cells.columns for value in cells.values(metric, side, column)]
            row.append(metric.show(values) if values else "")
        table.add_row(side, *row)
    return table


_TARGET = Metric("target at work", lambda cell: cell["verified"] / cell["seconds"], percent)


def _accepted(purposes: Sequence[Purpose]) -> Metric:
    """Return the acceptance of a cell's requests of these purposes."""

    def share(cell: Measured) -> float | None:
        accepted, reached = (sum(cell[name][_EVERY.index(p)] for p in purposes) for name in ("accepted", "reached"))
        return accepted / reached if reached else None

    return Metric("acceptance", share, percent)


def _by_purpose(cells: Cells) -> Table:
    """SEED, Figure 6: acceptance of the thought generator and the state evaluator."""
    columns = {f"{name} {part}": (name, purpose) for name in cells.columns for purpose, part in PURPOSES.items()}
    table = Table("", *columns, title="acceptance by purpose")
    for side in cells.sides:
        rates = [cells.values(_accepted([purpose]), side, column) for column, purpose in columns.values()]
        table.add_row(side, *(percent(found) if found else "" for found in rates))
    return table
