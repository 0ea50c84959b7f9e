"""The benchmark `decoders`: whole tree-of-thought searches with each decoding method, as in SEED's tables (section 5).

The searches follow the paper, with few-shot prompts of our own: n thoughts per state, the best of which is expanded, to
the task's depth, and a state evaluator that explains its value. Stop strings and end-of-text tokens apply. All sides
take turns at each question. Their caches start with the prompt prefix that all questions of a task share. Serial sides
decode one sample at a time. In float32, sides without a rejection rule write equal texts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.costs import costs_table, measure
from benchmarks.engines import about, searched
from benchmarks.harness import RATE, Bench, Measured, Measurements, Metric, Side, percent, times
from benchmarks.options import DecodersOptions
from benchmarks.schedule import Machine, Schedule, Wave, simulate
from benchmarks.workloads import questions
from tot.decoders.decoder import LocalDecoder, load_decoder
from tot.decoders.engine.runner import Chunk, Runner
from tot.decoders.methods.options import SEEDOptions
from tot.decoders.request import Completion, Purpose, Request
from tot.decoders.timeline import Timeline
from tot.evaluators.likelihood import Explain
from tot.generators.sample import Sample
from tot.registry import load_task
from tot.search.bfs import BFS
from tot.task.task import Task
from tot.tree.thought import Thought

SERIAL, PACKED = "ar, serial", "ar, packed"
KINDS = ("serial", "rounds", "packed")
PURPOSES: dict[Purpose, str] = {"generate": "thoughts", "evaluate": "evaluations"}
_COUNTED = ("forwards", "drafted", "accepted", "reached")
_ROWS = 512
"""Prompt tokens per forward during prefill."""


@dataclass(frozen=True)
class BenchProblem:
    """A question to search."""

    kind: str
    """The task's name on the command line."""
    task: Task
    question: str
    seed: int = 0


@dataclass
class Watched:
    """A decoder that counts tokens by purpose.

    If `serial`, it decodes one sample at a time.
    """

    decoder: LocalDecoder
    serial: bool = False
    counts: Counter[str] = field(default_factory=Counter)
    waves: list[Wave] = field(default_factory=list)
    """The texts of each call."""

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        samples = list(_samples(requests))
        batches = [[one] for one in samples] if self.serial else [samples]
        done = [one for batch in batches for one in self.decoder.generate(batch)]
        purpose = requests[0].purpose
        prompt = sum(one.usage.prompt_tokens - one.usage.reused_prompt_tokens for one in done)
        self.waves.append(Wave([one.usage.new_tokens for one in done], prompt))
        for one in done:
            self.counts[f"{purpose} tokens"] += one.usage.new_tokens
            for name in _COUNTED:
                self.counts[f"{purpose} {name}"] += getattr(one.usage, name)
        return done

    def total(self, name: str) -> int:
        return sum(count for key, count in self.counts.items() if key.endswith(f" {name}"))


def _samples(requests: Sequence[Request]) -> Iterator[Request]:
    """Yield one request per sample, each with its own seed: sample i has the same text alone and in a batch."""
    for request in requests:
        for i in range(request.sampling.n):
            alone = request.sampling.model_copy(update={"n": 1, "seed": request.sampling.seed ^ i})
            yield request.model_copy(update={"sampling": alone})


def hold_beginnings(decoder: LocalDecoder, problem: BenchProblem) -> None:
    """Prefill the prompts of a task's thoughts and evaluations, and keep their shared prefix in the cache.

    Both the target's and the draft's cache keep the prefix that other questions share.
    """
    for tokens in _prompts(decoder, problem):
        for runner in filter(None, (decoder.engine.runner, getattr(decoder.drafter, "runner", None))):
            decoder.engine.call(partial(_hold, runner, tokens))


def _prompts(decoder: LocalDecoder, problem: BenchProblem) -> list[list[int]]:
    """Return the first prompts of a problem's thoughts and evaluations."""
    task = problem.task
    state = task.start(problem.question)
    thought = state.then(Thought(parts=dict.fromkeys(task.thought, "-")))
    prompts = task.prompt(task.thought[0], state), Explain().prompt(task, thought)
    return [list(decoder.engine.codec.encode_prompt(prompt)) for prompt in prompts]


def _hold(runner: Runner, tokens: Sequence[int]) -> None:
    branch = runner.cache.open(tokens)
    for start in range(runner.cache.computed_length(branch), len(tokens), _ROWS):
        runner.forward([Chunk(branch, start, min(start + _ROWS, len(tokens)))])


def search(decoder: LocalDecoder, serial: bool, samples: int, temperature: float, problem: BenchProblem) -> Measured:
    """Search a question and return its measurements."""
    task, engine, watched = problem.task, decoder.engine, Watched(decoder, serial)
    engine.timeline = timeline = Timeline()
    seconds, _ = searched(
        [decoder],
        task,
        problem.question,
        decoder=watched,
        prompts="papers",
        seed=problem.seed,
        search=BFS(thoughts=samples, breadth=1, depth=task.depth),
        generator=Sample(temperature=temperature),
        evaluator=Explain(temperature=temperature),
    )
    totals = {name: watched.total(name) for name in ("tokens", *_COUNTED)}
    return {"seconds": seconds, **totals, "spent": timeline.seconds(), **watched.counts, "waves": watched.waves}


def run(asked: DecodersOptions, console: Console) -> None:
    """Run the benchmark and print the tables."""
    tasks: dict[str, list[BenchProblem]] = {}
    for text in asked.questions:
        name, _, file = text.partition("=")
        task = load_task(name)
        task_questions = questions(task, Path(file) if file else None, asked.limit)
        tasks[name] = [BenchProblem(name, task, question) for question in task_questions]
    with ExitStack() as stack:
        plain = stack.enter_context(load_decoder("ar", asked.model, **asked.computed))
        description = f"{asked.model}, drafts by {asked.draft}; {about(plain.engine)}"
        bench = Bench(asked, console, description)
        with load_decoder("sd", engine=plain.engine, draft=asked.draft) as drafting:
            assert drafting.drafter is not None
            lengths = [len(prompt) for problems in tasks.values() for prompt in _prompts(plain, problems[0])]
            machine = measure(plain.engine, drafting.drafter, round(fmean(lengths)))
        bench.keep(forwards=asdict(machine))
        bench.show(costs_table(machine))

        def side(name: str, method: str, serial: bool, temperature: float, **options: Any) -> Side:
            """Build a side with one decoder per task: statistics learned on one task do not apply to another."""
            decoder_options = options if method == "ar" else {"draft": asked.draft, **options}
            decoders = {
                task: stack.enter_context(load_decoder(method, engine=plain.engine, **decoder_options))
                for task in tasks
            }
            for task, decoder in decoders.items():
                hold_beginnings(decoder, tasks[task][0])
            return Side(name, lambda one: search(decoders[one.kind], serial, asked.samples, temperature, one))

        for temperature in asked.temperatures:
            asked_ways = ways(asked.k_configs, asked.parts)
            sides = [
                side(name, method, serial, temperature, **options)
                for name, (method, serial, options) in asked_ways.items()
            ]
            results = bench.compare(
                f"searches, T = {temperature}",
                sides,
                lambda name, turn: replace(tasks[name][turn % len(tasks[name])], seed=turn),
                columns=list(tasks),
                rounds=asked.limit,
                table=partial(_speeds, f"new tokens/s, T = {temperature}"),
            )
            bench.show(_by_purpose(results), _simulated(results, asked_ways, machine))


Way = tuple[str, bool, dict[str, Any]]
"""A decoding method, whether it decodes one text at a time, and its options."""


def ways(k_configs: Sequence[str], parts: Sequence[str] = KINDS) -> dict[str, Way]:
    """Return the sides of the given parts, by name.

    Drafts of each `k_config` are verified serially (the paper's baselines), in rounds (the paper's schedule) and packed
    (only drafts that pay). The first chain and the first tree also run with the papers' acceptance rules, serially and
    in rounds, and the first `k_config` in rounds with and without overlap.
    """
    sides: dict[str, Way] = {SERIAL: ("ar", True, {}), PACKED: ("ar", False, {})}
    rules: set[str] = set()
    for text in k_configs:
        config, label = tuple(map(int, text.split("-"))), text.replace("-", ",")
        chain = max(config) == 1
        method, rule = ("sd", "leviathan") if chain else ("mcsd", "mcsd")
        options: dict[str, Any] = {"k": len(config)} if chain else {"k_config": config}
        rounds = {"policy": "rounds", "k_config": config, "adapt": False}
        sides[f"{method} ({label}), serial"] = method, True, options
        sides[f"seed ({label}), rounds"] = "seed", False, rounds
        if rule not in rules:
            sides[f"{method} ({label}), {rule}'s rule, serial"] = method, True, {**options, "rule": rule}
            sides[f"seed ({label}), {rule}'s rule, rounds"] = "seed", False, {**rounds, "rule": rule}
            rules.add(rule)
        if text == k_configs[0]:
            for overlap in (True, False):
                overlap_label = "overlap" if overlap else "no overlap"
                sides[f"seed ({label}), rounds, {overlap_label}"] = "seed", False, {**rounds, "overlap": overlap}
    sides["seed, packed"] = "seed", False, {}
    return {name: side for name, side in sides.items() if _kind(name) in parts or name == PACKED}


def _kind(side: str) -> str:
    return next(kind for kind in KINDS if kind in side)


# -- tables -------------------------------------------------------------------------------------------------------


def _speeds(title: str, results: Measurements) -> Table:
    """SEED, table 1: one row per side; per task, tokens/s and the speedups over serial and packed `ar`."""
    columns = ("tokens/s", *(f"of {base}" for base in (SERIAL, PACKED)))
    heads = [f"{name}: {column}" for name in results.columns for column in columns]
    table = Table("", *heads, "acceptance", "target at work", title=title)
    for side in results.sides:
        cells = []
        for column in results.columns:
            ratios = [times(results.ratios(RATE, side, base, column)) for base in (SERIAL, PACKED)]
            cells += [RATE.show(results.values(RATE, side, column)), *ratios]
        others = [_all_columns(results, metric, side) for metric in (_ACCEPTANCE, _TARGET)]
        table.add_row(side, *cells, *others)
    return table


def _share(count: str, total: str) -> Callable[[Measured], float | None]:
    return lambda measured: measured[count] / measured[total] if measured.get(total) else None


_ACCEPTANCE = Metric("acceptance", _share("accepted", "reached"), percent)
_TARGET = Metric("target at work", lambda measured: measured["spent"].get("verify", 0.0) / measured["seconds"], percent)


def _all_columns(results: Measurements, metric: Metric, side: str) -> str:
    values = [value for column in results.columns for value in results.values(metric, side, column)]
    return metric.show(values) if values else ""


def _by_purpose(results: Measurements) -> Table:
    """SEED, Figure 6: acceptance of the thought generator and the state evaluator."""
    columns = {f"{name} {part}": (name, purpose) for name in results.columns for purpose, part in PURPOSES.items()}
    table = Table("", *columns, title="acceptance by purpose")
    for side in results.sides:
        cells = []
        for column, purpose in columns.values():
            accepted = Metric(purpose, _share(f"{purpose} accepted", f"{purpose} reached"), percent)
            rates = results.values(accepted, side, column)
            cells.append(percent(rates) if rates else "")
        table.add_row(side, *cells)
    return table


def schedule_of(way: Way) -> Schedule:
    """Return the simulated schedule of a side."""
    method, serial, options = way
    if method == "ar":
        return Schedule("serial" if serial else "packed")
    settings = SEEDOptions(**options) if method == "seed" else None
    k_config = settings.k_config if settings else options.get("k_config", (1,) * options.get("k", 0))
    if settings is None or serial:
        return Schedule("serial", k_config)
    return Schedule(settings.policy, k_config, settings.adapt, settings.overlap)


def _simulated(results: Measurements, sides: Mapping[str, Way], machine: Machine) -> Table:
    """Compare the measured speed of each side with the simulated one, both relative to the first side.

    Only the acceptance, of all sides together, is taken from the measured searches. A machine's speed changes with the
    time, so seconds are not compared.
    """
    accepted, reached = (sum(cell[name] for cell in results.cells) for name in ("accepted", "reached"))
    chance = accepted / reached if reached else 0.0
    measured, simulated = {}, {}
    for side in results.sides:
        cells = [cell for column in results.columns for cell in results.of(side, column).values()]
        waves = [Wave(*wave) for cell in cells for wave in cell["waves"]]
        tokens = sum(cell["tokens"] for cell in cells)
        measured[side] = tokens / sum(cell["seconds"] for cell in cells)
        simulated[side] = tokens / simulate(schedule_of(sides[side]), waves, machine, chance)
    base = results.sides[0]
    table = Table("", "measured", "simulated", "of measured", title=f"speed relative to {base}, simulated")
    for side in results.sides:
        speeds = [rates[side] / rates[base] for rates in (measured, simulated)]
        table.add_row(side, *(f"{speed:.2f}x" for speed in (*speeds, speeds[1] / speeds[0])))
    return table
