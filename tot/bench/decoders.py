"""`tot bench decoders`: whole tree-of-thought searches by each decoding method, as in SEED's tables (section 5).

The searches are the paper's: few-shot prompts, n thoughts a state of which the best is gone on with, to each task's
depth, and a state evaluator that explains its value. Texts have their stops and ends. All sides take turns at each
question, from stores that hold nothing but what the prompts of all questions begin with, as they do after the first of
many. Serial sides decode one sample at a time.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from tot.bench.engines import about, forget, metrics_of
from tot.bench.harness import RATE, Bench, Measured, Measurements, Metric, Side, percent, timed, times
from tot.bench.options import DecodersOptions
from tot.bench.workloads import questions
from tot.decoders.decoder import LocalDecoder, load_decoder
from tot.decoders.engine.runner import Chunk, Runner
from tot.decoders.request import Completion, Purpose, Request
from tot.evaluators.likelihood import Explain
from tot.generators.sample import Sample
from tot.registry import load_task
from tot.search import BFS
from tot.solver import solve
from tot.task.task import Task
from tot.tree.thought import Thought

SERIAL, PACKED = "ar, serial", "ar, packed"
KINDS = ("serial", "rounds", "packed")
PURPOSES: dict[Purpose, str] = {"generate": "thoughts", "evaluate": "evaluations"}
_COUNTED = ("forwards", "drafted", "accepted", "reached")
_ROWS = 512
"""Of a prompt that are computed in one forward."""
_BINS = (0.0, 0.5, 0.6, 0.7, 0.8, 0.9)
"""Of acceptance rates."""


@dataclass(frozen=True)
class BenchProblem:
    """A question to be searched."""

    kind: str
    """The task as it was asked for."""
    task: Task
    question: str
    seed: int = 0


@dataclass
class Watched:
    """A decoder of which it is noted what each purpose took; `serial` is asked for one sample at a time."""

    decoder: LocalDecoder
    serial: bool = False
    seconds: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    counts: Counter[str] = field(default_factory=Counter)

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        batches = [[one] for one in _samples(requests)] if self.serial else [requests]
        done: list[Completion]
        seconds, done = timed(lambda: [one for batch in batches for one in self.decoder.generate(batch)])
        purpose = requests[0].purpose
        self.seconds[purpose] += seconds
        for one in done:
            self.counts[f"{purpose} tokens"] += one.usage.new_tokens
            for name in _COUNTED:
                self.counts[f"{purpose} {name}"] += getattr(one.usage, name)
        return done

    def total(self, name: str) -> int:
        return sum(count for key, count in self.counts.items() if key.endswith(f" {name}"))


def _samples(requests: Sequence[Request]) -> Iterator[Request]:
    """A request for each sample, with a seed of its own."""
    for request in requests:
        for i in range(request.sampling.n):
            alone = request.sampling.model_copy(update={"n": 1, "seed": request.sampling.seed ^ i})
            yield request.model_copy(update={"sampling": alone})


def hold_beginnings(decoder: LocalDecoder, problem: BenchProblem) -> None:
    """Have the prompts of a task's thoughts and evaluations computed by target and draft. What other questions' prompts
    share with them is not forgotten."""
    task, engine = problem.task, decoder.engine
    state = task.start(problem.question)
    thought = state.then(Thought(parts=dict.fromkeys(task.thought, "-")))
    for prompt in (task.prompt(task.thought[0], state), Explain().prompt(task, thought)):
        for runner in filter(None, (engine.runner, getattr(decoder.drafter, "runner", None))):
            engine.call(partial(_hold, runner, engine.codec.encode_prompt(prompt)))


def _hold(runner: Runner, tokens: Sequence[int]) -> None:
    branch = runner.cache.open(tokens)
    for start in range(runner.cache.computed_length(branch), len(tokens), _ROWS):
        runner.forward([Chunk(branch, start, min(start + _ROWS, len(tokens)))])


def search(decoder: LocalDecoder, serial: bool, samples: int, temperature: float, problem: BenchProblem) -> Measured:
    """Search a question, and what that took."""
    task, engine, watched = problem.task, decoder.engine, Watched(decoder, serial)
    forget(decoder)
    parts: dict[str, Any] = {
        "search": BFS(thoughts=samples, breadth=1, depth=task.depth),
        "generator": Sample(temperature=temperature),
        "evaluator": Explain(temperature=temperature),
    }
    asking = partial(solve, task, problem.question, decoder=watched, prompts="papers", seed=problem.seed, **parts)
    seconds, _ = timed(asking)
    spent: Counter[str] = Counter()
    for purpose in PURPOSES:
        spent.update(metrics_of(engine, purpose).seconds)
    took = {name: watched.total(name) for name in ("tokens", *_COUNTED)}
    return {"seconds": seconds, **took, "spent": dict(spent), **watched.counts, "by purpose": dict(watched.seconds)}


def run(asked: DecodersOptions, console: Console) -> None:
    """Measure, and print the tables."""
    tasks: dict[str, list[BenchProblem]] = {}
    for text in asked.questions:
        name, _, file = text.partition("=")
        task = load_task(name)
        found = questions(task, Path(file) if file else None, asked.limit)
        tasks[name] = [BenchProblem(name, task, question) for question in found]
    with ExitStack() as stack:
        plain = stack.enter_context(load_decoder("ar", asked.model, **asked.computed))
        told = f"{asked.model}, drafts by {asked.draft}; {about(plain.engine)}"
        bench = stack.enter_context(Bench(asked, console, told))

        def side(name: str, method: str, serial: bool, temperature: float, **options: Any) -> Side:
            """With a decoder for each task, as what it learns of one does not hold for another."""
            given = options if method == "ar" else {"draft": asked.draft, **options}
            decoders = {task: stack.enter_context(load_decoder(method, engine=plain.engine, **given)) for task in tasks}
            for task, decoder in decoders.items():
                hold_beginnings(decoder, tasks[task][0])
            return Side(name, lambda one: search(decoders[one.kind], serial, asked.samples, temperature, one))

        for temperature in asked.temperatures:
            sides = [
                side(name, method, serial, temperature, **options)
                for name, (method, serial, options) in ways(asked.k_configs, asked.parts).items()
            ]
            results = bench.compare(
                f"searches, T = {temperature}",
                sides,
                lambda name, turn: replace(tasks[name][turn % len(tasks[name])], seed=turn),
                columns=list(tasks),
                rounds=asked.limit,
                table=partial(_speeds, f"new tokens/s, T = {temperature}"),
            )
            bench.show(_by_purpose(results), _by_acceptance(results), *_overlap(results, asked.samples))
            if asked.picture is not None:
                from tot.report.plots import curves, save

                lines = {
                    kind: ([rate for rate, _ in sorted(points)], [speed for _, speed in sorted(points)])
                    for kind, points in _of_acceptance(results).items()
                }
                figure = curves(lines, "acceptance", "speed of ar, serial")
                save(figure, asked.picture.with_stem(f"{asked.picture.stem}-{temperature}"))


def ways(k_configs: Sequence[str], parts: Sequence[str] = KINDS) -> dict[str, tuple[str, bool, dict[str, Any]]]:
    """The sides of these parts, by name: method, whether serial, options. Drafts of each kind are verified serially, as
    the paper's baselines do; in rounds, its schedule; and packed, as far as they pay. The first kind is verified by the
    papers' rule as well, and in rounds with and without overlap."""
    found: dict[str, tuple[str, bool, dict[str, Any]]] = {SERIAL: ("ar", True, {}), PACKED: ("ar", False, {})}
    for text in k_configs:
        config, shown = tuple(map(int, text.split("-"))), text.replace("-", ",")
        chain = max(config) == 1
        method, rule = ("sd", "leviathan") if chain else ("mcsd", "mcsd")
        options: dict[str, Any] = {"k": len(config)} if chain else {"k_config": config}
        found[f"{method} ({shown}), serial"] = method, True, options
        if text == k_configs[0]:
            found[f"{method} ({shown}), {rule}'s rule, serial"] = method, True, {**options, "rule": rule}
        rounds = {"policy": "rounds", "k_config": config, "adapt": False}
        found[f"seed ({shown}), rounds"] = "seed", False, rounds
        if text == k_configs[0]:
            for overlap in (True, False):
                said = "overlap" if overlap else "no overlap"
                found[f"seed ({shown}), rounds, {said}"] = "seed", False, {**rounds, "overlap": overlap}
    found["seed, packed"] = "seed", False, {}
    return {name: side for name, side in found.items() if _kind(name) in parts or name == PACKED}


def _kind(side: str) -> str:
    return next(kind for kind in KINDS if kind in side)


# -- tables -------------------------------------------------------------------------------------------------------


def _speeds(title: str, results: Measurements) -> Table:
    """SEED's table 1: a row a side; of each task its speed, and how much that is of `ar`, serial and packed."""
    heads = [head for name in results.columns for head in (f"{name}: tokens/s", "of ar, serial", "of ar, packed")]
    table = Table("", *heads, "acceptance", "target at work", title=title)
    for side in results.sides:
        cells = []
        for column in results.columns:
            ratios = [times(results.ratios(RATE, side, base, column)) for base in (SERIAL, PACKED)]
            cells += [RATE.show(results.values(RATE, side, column)), *ratios]
        others = [_all(results, metric, side) for metric in (_ACCEPTANCE, _TARGET)]
        table.add_row(side, *cells, *others)
    return table


def _share(count: str, total: str) -> Callable[[Measured], float | None]:
    return lambda took: took[count] / took[total] if took.get(total) else None


_ACCEPTANCE = Metric("acceptance", _share("accepted", "reached"), percent)
_TARGET = Metric("target at work", lambda took: took["spent"].get("verify", 0.0) / took["seconds"], percent)


def _all(results: Measurements, metric: Metric, side: str) -> str:
    values = [value for column in results.columns for value in results.values(metric, side, column)]
    return metric.show(values) if values else ""


def _by_purpose(results: Measurements) -> Table:
    """SEED's figure 6: the thought generator and the state evaluator apart."""
    heads = [f"{name} {part}: {what}" for name in results.columns for part in PURPOSES.values() for what in _SAID]
    table = Table("", *heads, title="by purpose: acceptance, and speed of ar, serial")
    for side in results.sides:
        cells = []
        for column in results.columns:
            for purpose in PURPOSES:
                rate = Metric(purpose, partial(_rate_of, purpose))
                accepted = Metric(purpose, _share(f"{purpose} accepted", f"{purpose} reached"), percent)
                rates = results.values(accepted, side, column)
                cells += [percent(rates) if rates else "", times(results.ratios(rate, side, SERIAL, column))]
        table.add_row(side, *cells)
    return table


_SAID = ("acceptance", "speed")


def _rate_of(purpose: Purpose, took: Measured) -> float | None:
    seconds = took["by purpose"].get(purpose)
    return float(took.get(f"{purpose} tokens", 0) / seconds) if seconds else None


def _of_acceptance(results: Measurements) -> dict[str, list[tuple[float, float]]]:
    """Of each search in these ways the share of its drafts that was accepted, and its speed, of serial `ar`."""
    found: dict[str, list[tuple[float, float]]] = {kind: [] for kind in KINDS}
    for side in results.sides:
        for column in results.columns:
            base = results.of(SERIAL, column)
            for turn, took in results.of(side, column).items():
                if turn in base and (rate := _ACCEPTANCE.of(took)) is not None:
                    found[_kind(side)].append((rate, RATE.ratio(took, base[turn])))
    return found


def _by_acceptance(results: Measurements) -> Table:
    """SEED's figure 5, in words."""
    found = _of_acceptance(results)
    table = Table("acceptance from", *found, title="speed of ar, serial, by acceptance (searches)")
    for low, high in pairwise((*_BINS, math.inf)):
        shown = [[speed for rate, speed in points if low <= rate < high] for points in found.values()]
        if any(shown):
            table.add_row(f"{low:.1f}", *(f"{times(speeds)}, {len(speeds)}" if speeds else "" for speeds in shown))
    return table


def _overlap(results: Measurements, samples: int) -> Iterator[str]:
    """On what machine drafting beside the target pays, by what a draft and its verification take here."""
    for side in results.sides:
        if not side.endswith("no overlap"):
            continue
        apart, beside = (
            [took for column in results.columns for took in results.of(name, column).values()]
            for name in (side, side.replace("no overlap", "overlap"))
        )
        draft, verify = (statistics.median(_a_forward(took, part) for took in apart) for part in ("draft", "verify"))
        slower = statistics.median(_a_forward(took, "verify") for took in beside) / verify
        one, each = (gain(draft, verify, samples, devices) for devices in (1, samples))
        yield (
            f"{side.partition(', rounds')[0]}: a draft takes {1000 * draft:.0f} ms, verifying {1000 * verify:.0f} ms, "
            f"and {slower:.2f} times as long while others draft. Overlap pays where that is under "
            f"{(draft + verify) / verify:.2f}: where it costs the target nothing, {samples} thoughts in rounds are "
            f"{one:.2f}x of serial, and {each:.2f}x with a place to draft for each"
        )


def _a_forward(took: Measured, part: str) -> float:
    return float(took["spent"].get(part, 0.0) / max(1, took["forwards"]))


def gain(draft: float, verify: float, branches: int, devices: int) -> float:
    """How many times as fast as one after another `branches` texts are in rounds, where so many `devices` draft beside
    the target: as fast as each text's own turns, the target or the devices allow."""
    return min(branches, (draft + verify) / max(verify, draft / devices))
