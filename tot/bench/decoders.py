"""`tot bench decoders`: decoding methods side by side on one engine, as in SEED's tables.

The prompts are those of real searches: the first thought after each task's questions, n samples of it, and the
evaluations of such thoughts. All sides take turns at each prompt, in another order every time, and ratios are medians
over prompts; every round has other questions and another seed. Prompts are computed beforehand, so only decoding is
timed.
"""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from tot.bench.machine import describe, spread
from tot.decoders.decoder import METHODS, LocalDecoder, load_decoder
from tot.decoders.engine.engine import Engine
from tot.decoders.engine.loading import load_model
from tot.decoders.engine.timeline import Timeline
from tot.decoders.errors import OptionError, unknown
from tot.decoders.request import Message, Purpose, Request, Sampling
from tot.decoders.speculative import MCSDOptions, SDOptions
from tot.named import load_task
from tot.report.plots import gantt, save, utilisation
from tot.search import BFS
from tot.solver import solve
from tot.tree import write_json
from tot.values import Value

TASKS = ("gsm8k", "creative_writing", "blocksworld")
WARM_UP = ("game24", "multiple_choice")
NEW = 48
CONFIGS = {"sd": (1, 1, 1), "mcsd": (2, 2, 1)}
"""k_config of each method in SEED's tables; the options k and k_config take their places."""
WIDE: dict[str, dict[str, Any]] = {
    "jacobi": {"n": 16, "adapt": False},
    "lookahead": {"window": 15, "ngram": 5, "guesses": 15, "adapt": False},
}
"""What only pays where rows cost nothing: as many tokens a forward as can be had."""
_SET_HERE = {"policy", "overlap", "adapt", "rule", "replacement", "draft_temperature"}
Group = list[tuple[Message, ...]]
"""Prompts that a search asks at once."""


@dataclass
class Side:
    """A method on a schedule, and what was measured of it."""

    name: str
    decoder: LocalDecoder
    serial: bool = False
    speeds: list[float] = field(default_factory=list)
    """New tokens a second, by prompt."""
    drafted: int = 0
    accepted: int = 0
    tokens: int = 0
    forwards: int = 0

    @property
    def share(self) -> str:
        return f"{100 * self.accepted / self.drafted:.0f}% of {self.drafted}" if self.drafted else ""

    def turn(self, groups: Sequence[Group], sampling: Sampling, purpose: Purpose = "generate") -> float:
        """Decode the samples of every group of prompts, packed or one after another. Returns new tokens a second."""
        alone = [sampling.model_copy(update={"n": 1, "seed": 1000 * sampling.seed + i}) for i in range(sampling.n)]
        tokens, seconds = 0, 0.0
        for group in groups:
            together = [Request(prompt=prompt, sampling=sampling, purpose=purpose) for prompt in group]
            one_by_one = [[Request(prompt=p, sampling=each, purpose=purpose)] for p in group for each in alone]
            for requests in one_by_one if self.serial else [together]:
                began = time.perf_counter()
                completions = self.decoder.generate(requests)
                seconds += time.perf_counter() - began
                tokens += sum(completion.usage.new_tokens for completion in completions)
                self.forwards += sum(completion.usage.forwards for completion in completions)
                self.drafted += sum(completion.usage.drafted for completion in completions)
                self.accepted += sum(completion.usage.accepted for completion in completions)
        self.tokens += tokens
        return tokens / seconds


class Bench:
    """What all sections measure on: one engine, the prompts of each round, and the numbers found."""

    def __init__(self, engine: Engine, options: dict[str, Any], samples: int, rounds: int, console: Console) -> None:
        self.engine = engine
        self.options = options
        self.samples = samples
        self.rounds = rounds
        self.console = console
        self.numbers: dict[str, Any] = {"machine": describe(engine.loaded.device, engine.loaded.dtype)}
        self.stack = ExitStack()
        self.configs: dict[str, tuple[int, ...]] = dict(CONFIGS)
        if "k" in options:
            self.configs["sd"] = SDOptions(k=options["k"]).k_config
        if "k_config" in options:
            self.configs["mcsd"] = MCSDOptions(k_config=options["k_config"]).k_config

    def side(self, name: str, method: str, serial: bool = False, **options: Any) -> Side:
        known = METHODS[method].options.model_fields
        given = {option: value for option, value in self.options.items() if option in known}
        decoder = self.stack.enter_context(load_decoder(method, engine=self.engine, **given | options))
        return Side(name, decoder, serial)

    def sampling(self, temperature: float, seed: int, purpose: Purpose) -> Sampling:
        """n thoughts after a state; one evaluation of each of its n thoughts."""
        n = self.samples if purpose == "generate" else 1
        return Sampling(max_tokens=NEW, temperature=temperature, seed=seed, n=n, ignore_eos=True)

    def compare(
        self,
        title: str,
        sides: Sequence[Side],
        prompts: Sequence[Sequence[Group]],
        temperature: float,
        purpose: Purpose = "generate",
        against: Sequence[int] = (0, 1),
    ) -> None:
        """Rounds of all sides in turns, and a table with their ratios to the sides numbered in `against`."""
        warm_up, *rest = prompts
        for number, groups in enumerate([warm_up, *(rest[i % len(rest)] for i in range(self.rounds))]):
            for turn, group in enumerate(groups):
                one = Sampling(max_tokens=1)
                sides[0].decoder.generate([Request(prompt=prompt, sampling=one) for prompt in group])
                first = (number + turn * (len(sides) // len(groups) or 1)) % len(sides)
                for side in (*sides[first:], *sides[:first]):
                    speed = side.turn([group], self.sampling(temperature, number, purpose), purpose)
                    if number:
                        side.speeds.append(speed)
                    else:
                        side.drafted = side.accepted = side.tokens = side.forwards = 0
        compared = [f"against {sides[i].name}" for i in against]
        table = Table("decoder", "new tokens/s", *compared, "tokens a forward", "accepted")
        for side in sides:
            ratios = [
                statistics.median(ours / theirs for ours, theirs in zip(side.speeds, sides[i].speeds, strict=True))
                for i in against
            ]
            self.numbers[f"{title}: {side.name}"] = {
                "speeds": side.speeds,
                "ratios": ratios,
                "drafted": side.drafted,
                "accepted": side.accepted,
                "tokens_per_forward": side.tokens / side.forwards,
            }
            shown = (f"{ratio:.2f}x" for ratio in ratios)
            table.add_row(side.name, spread(side.speeds), *shown, f"{side.tokens / side.forwards:.2f}", side.share)
        self.console.print(title)
        self.console.print(table)


def run(
    methods: Sequence[str],
    model: str,
    options: dict[str, Any],
    temperatures: Sequence[float],
    samples: int,
    rounds: int,
    out: Path,
    console: Console,
) -> None:
    """Measure, print the tables, and write the numbers to `out` and the pictures beside it."""
    for method in methods:
        if method not in METHODS:
            raise OptionError(unknown("decoder", method, METHODS))
    for name in _SET_HERE & options.keys():
        raise OptionError(f"{name} is what is compared here: leave it out")
    known = {name for method in methods for name in METHODS[method].options.model_fields} - _SET_HERE
    for name in options.keys() - known:
        raise OptionError(unknown(f"option of {', '.join(methods)}", name, known))
    with load_decoder("ar", model) as plain:
        bench = Bench(plain.engine, options, samples, rounds, console)
        what = f"{', '.join(TASKS)}; {samples} samples of {NEW} tokens; {rounds} rounds"
        console.print(f"{model}; {bench.numbers['machine']}; drafts: {options.get('draft', 'lookup')}; {what}")
        evaluations = _evaluations(bench, plain)
        with bench.stack:
            thoughts = list(_thoughts())
            for temperature in temperatures:
                bench.compare(f"thoughts, T = {temperature}", _sides(bench, methods), thoughts, temperature)
            if {"sd", "mcsd"} & set(methods):
                for temperature in temperatures:
                    sides = _rules(bench, methods)
                    bench.compare(f"rules, T = {temperature}", sides, thoughts, temperature, against=(0,))
                bench.compare("state evaluations, T = 0.2", _by_lookup(bench), evaluations, 0.2, "evaluate")
                for temperature in temperatures:
                    _against_generate(bench, model, methods, thoughts, temperature)
            if "seed" in methods:
                _by_purpose(bench, thoughts, evaluations)
                _pictures(bench, thoughts[1], out)
        write_json(out, bench.numbers)
    console.print(f"numbers: {out}")


def _sides(bench: Bench, methods: Sequence[str]) -> list[Side]:
    """SEED's table: each method serial, under SEED's rounds without and with overlap, and packed."""
    sides = [bench.side("ar, serial", "ar", serial=True), bench.side("ar, packed", "ar")]
    configs = {method: config for method, config in bench.configs.items() if method in methods}
    for method, config in configs.items():
        given: dict[str, Any] = {"k": len(config)} if method == "sd" else {"k_config": config}
        shown = _titled(method, config)
        sides.append(bench.side(f"{shown}, serial", method, serial=True, **given))
        sides.append(bench.side(f"{shown}, packed", method, **given))
    if "seed" in methods:
        for config in configs.values() or [bench.configs["sd"]]:
            shown = _titled("seed", config)
            rounds: dict[str, Any] = {"policy": "rounds", "k_config": config, "adapt": False}
            sides.append(bench.side(f"{shown}, rounds, no overlap", "seed", overlap=False, **rounds))
            sides.append(bench.side(f"{shown}, rounds", "seed", **rounds))
            sides.append(bench.side(f"{shown}, packed", "seed", k_config=config))
        sides.append(bench.side("seed, packed", "seed"))
    others = [method for method in methods if method not in {"ar", "seed", *CONFIGS}]
    for method in others:
        sides += [bench.side(f"{method}, serial", method, serial=True), bench.side(f"{method}, packed", method)]
        if method in WIDE:
            sides.append(bench.side(f"{method}, {_said(WIDE[method])}, serial", method, serial=True, **WIDE[method]))
    return sides


def _rules(bench: Bench, methods: Sequence[str]) -> list[Side]:
    """Acceptance under each rule."""
    sides = [bench.side("ar, packed", "ar")]
    if "sd" in methods:
        config = bench.configs["sd"]
        for rule in ("coupled", "leviathan"):
            sides.append(bench.side(f"{_titled('sd', config)}, {rule}", "sd", k=len(config), rule=rule))
    if "mcsd" in methods:
        config = bench.configs["mcsd"]
        shown = _titled("mcsd", config)
        sides.append(bench.side(f"{shown}, coupled", "mcsd", k_config=config))
        for replacement in (False, True):
            name = f"{shown}, mcsd {'with' if replacement else 'without'} replacement"
            sides.append(bench.side(name, "mcsd", k_config=config, rule="mcsd", replacement=replacement))
    return sides


def _said(options: dict[str, Any]) -> str:
    return ", ".join(f"{name}={value}" for name, value in options.items())


def _titled(method: str, config: Sequence[int]) -> str:
    return f"{method} ({','.join(map(str, config))})"


def _thoughts() -> Iterator[list[Group]]:
    """By round, after one to warm up: the first thought of each task's next question."""
    warm_up = [load_task(name) for name in WARM_UP]
    yield [[task.prompt(task.thought[0], task.start(task.example()))] for task in warm_up]
    tasks = [load_task(name) for name in TASKS]
    questions = [[task.question_of(row) for row in task.data("questions")] for task in tasks]
    for round_questions in zip(*questions, strict=False):
        yield [
            [task.prompt(task.thought[0], task.start(question))]
            for task, question in zip(tasks, round_questions, strict=True)
        ]


def _evaluations(bench: Bench, plain: LocalDecoder) -> list[list[Group]]:
    """By round, after one to warm up: the evaluations of sibling thoughts, grown after each task's next question."""
    prompts: list[list[Group]] = []
    for number in range(bench.rounds + 1):
        prompts.append([])
        for name in TASKS:
            task = load_task(name)
            rows = task.data("questions")
            tree = solve(
                task,
                task.question_of(rows[number % len(rows)]),
                decoder=plain,
                search=BFS(thoughts=bench.samples, breadth=1, depth=2),
                evaluator="random",
                max_tokens=NEW,
                seed=number,
            ).tree
            states = [tree.state(node) for node in tree if node.parent is not None]
            prompts[-1].append([Value().prompt(task, state) for state in states])
    return prompts


def _by_lookup(bench: Bench) -> list[Side]:
    """Without any draft model."""
    return [
        bench.side("ar, serial", "ar", serial=True),
        bench.side("ar, packed", "ar"),
        bench.side("sd by lookup, serial", "sd", serial=True, draft="lookup"),
        bench.side("sd by lookup, packed", "sd", draft="lookup"),
        bench.side("seed by lookup, packed", "seed", draft="lookup"),
    ]


def _against_generate(
    bench: Bench, model: str, methods: Sequence[str], thoughts: Sequence[Sequence[Group]], temperature: float
) -> None:
    """One prompt at a time against transformers' assisted generation with the same draft; prefill counts on all."""
    import torch

    k = len(bench.configs["sd"])
    sides = [bench.side("sd", "sd", serial=True, k=k)]
    if "seed" in methods:
        sides.append(bench.side("seed", "seed", serial=True))
    drafter: Any = sides[0].decoder.drafter
    target = load_model(model, dtype=str(bench.engine.loaded.dtype).removeprefix("torch."))
    theirs: dict[str, Any] = {"prompt_lookup_num_tokens": k}
    if drafter.runner is not None:
        assistant = copy.deepcopy(drafter.runner.model)
        assistant.set_attn_implementation("sdpa")
        assistant.generation_config.num_assistant_tokens = k
        theirs = {"assistant_model": assistant}
    speeds: dict[str, list[float]] = {"transformers": [], **{side.name: [] for side in sides}}
    for number in range(bench.rounds + 1):
        groups = thoughts[0] if not number else thoughts[1 + (number - 1) % (len(thoughts) - 1)]
        sampling = bench.sampling(temperature, number, "generate").model_copy(update={"n": 1})
        tokens, seconds = 0, 0.0
        for group in groups:
            ids = torch.tensor([bench.engine.codec.encode_prompt(group[0])])
            torch.manual_seed(number)
            began = time.perf_counter()
            with torch.inference_mode():
                made = target.model.generate(
                    ids,
                    attention_mask=torch.ones_like(ids),
                    **({"do_sample": True, "temperature": temperature, "top_k": 0} if temperature else {}),
                    max_new_tokens=NEW,
                    min_new_tokens=NEW,
                    **theirs,
                )
            seconds += time.perf_counter() - began
            tokens += made.shape[1] - ids.shape[1]
        found = {"transformers": tokens / seconds}
        for side in sides:
            bench.engine.call(bench.engine.tree.clear)
            found[side.name] = side.turn(groups, sampling)
        if number:
            for name, speed in found.items():
                speeds[name].append(speed)
    bench.numbers[f"against generate, T = {temperature}"] = speeds
    for side in sides:
        ratio = statistics.median(speeds[side.name]) / statistics.median(speeds["transformers"])
        bench.console.print(
            f"one prompt at a time, T = {temperature}, prefill counted: {side.name} {spread(speeds[side.name])} "
            f"tokens/s, transformers' generate({', '.join(theirs)}) {spread(speeds['transformers'])}: {ratio:.2f}x"
        )


def _by_purpose(bench: Bench, thoughts: Sequence[Sequence[Group]], evaluations: Sequence[Sequence[Group]]) -> None:
    """Thought generator and state evaluator apart (SEED v2, RQ2): k_config (2,2,1), T = 1."""
    asked: dict[Purpose, Sequence[Sequence[Group]]] = {"generate": thoughts, "evaluate": evaluations}
    for purpose, prompts in asked.items():
        sides = [bench.side("ar, serial", "ar", serial=True), bench.side("seed, packed", "seed", k_config=(2, 2, 1))]
        bench.compare(f"purpose {purpose}, T = 1", sides, prompts, 1.0, purpose, against=(0,))
    bench.engine.accounts.clear()
    side = bench.side("seed, packed", "seed", k_config=(2, 2, 1), adapt=False)
    table = Table("purpose", "accepted", "by position", "tokens a verification", "draft", "verify", "sampling", "else")
    for purpose, prompts in asked.items():
        side.turn(prompts[1], bench.sampling(1.0, 1, purpose), purpose)
        account = bench.engine.accounts[purpose]
        seconds = {name: account.seconds[name] for name in ("draft", "verify", "sampling", "scheduling")}
        total = sum(seconds.values())
        bench.numbers[f"account, {purpose}"] = {
            "acceptance_rate": account.acceptance_rate,
            "by_position": account.by_position,
            "block_efficiency": account.block_efficiency,
            "seconds": seconds,
        }
        table.add_row(
            purpose,
            f"{100 * account.acceptance_rate:.0f}% of {account.drafted}",
            ", ".join(f"{100 * rate:.0f}%" for rate in account.by_position),
            f"{account.block_efficiency:.2f}",
            *(f"{100 * value / total:.0f}%" for value in seconds.values()),
        )
    bench.console.print("where the time goes: seed, packed, k_config (2,2,1) always drafted whole, T = 1")
    bench.console.print(table)


def _pictures(bench: Bench, groups: Sequence[Group], out: Path) -> None:
    """A Gantt chart of SEED's rounds, and how busy the target is under each schedule."""
    config = bench.configs["sd"]
    options: dict[str, Any] = {"k_config": config, "adapt": False}
    sides = {
        "sd, serial": bench.side("sd", "sd", serial=True, k=len(config)),
        "seed, rounds without overlap": bench.side("off", "seed", policy="rounds", overlap=False, **options),
        "seed, rounds": bench.side("on", "seed", policy="rounds", **options),
        "seed, packed": bench.side("packed", "seed", **options),
    }
    runs: dict[str, Timeline] = {}
    for name, side in sides.items():
        for _ in range(2):  # what is computed for the first time is not in the picture
            bench.engine.timeline = runs[name] = Timeline()
            side.turn(groups[:1], bench.sampling(0.2, 1, "generate"))
    bench.engine.timeline = None
    rounds = runs["seed, rounds"]
    longest = max((length for _, length in rounds.queue), default=0)
    bench.numbers["longest queue"] = longest
    bench.console.print(f"seed, rounds: up to {longest} drafts waited in the queue at once")
    try:
        for name, figure in {
            "gantt": gantt(rounds, "SEED, rounds: drafts of three thoughts, verified first come, first served"),
            "utilisation": utilisation(runs),
        }.items():
            path = out.with_name(f"{out.stem}-{name}.png")
            save(figure, path)
            bench.console.print(f"picture: {path}")
    except OptionError as error:  # matplotlib is an extra
        bench.console.print(str(error))
