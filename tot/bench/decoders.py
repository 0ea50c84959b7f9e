"""`tot bench decoders`: decoding methods side by side on one engine, as in SEED's tables.

The prompts are those of real searches: the first thought after each task's questions, n samples of it, and the
evaluations of such thoughts. All sides take turns at each prompt, in another order every time, and ratios are medians
over prompts; every round has other questions and another seed. Prompts are computed beforehand, so only decoding is
timed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from tot.bench.decoders_generate import against_generate, room_for_generate
from tot.bench.decoders_seed import by_purpose, pictures
from tot.bench.decoders_sides import CONFIGS, Bench, Group, Side
from tot.decoders.decoder import METHODS, load_decoder, options_of
from tot.decoders.errors import OptionError, unknown
from tot.decoders.local import LocalDecoder
from tot.evaluators.model import Value
from tot.registry import load_task
from tot.search import BFS
from tot.solver import solve

TASKS = ("gsm8k", "creative_writing", "blocksworld")
WARM_UP = ("game24", "multiple_choice")
NEW = 48
WIDE: dict[str, dict[str, Any]] = {
    "jacobi": {"n": 16, "adapt": False},
    "lookahead": {"window": 15, "ngram": 5, "guesses": 15, "adapt": False},
}
"""What only pays where rows cost nothing: as many tokens a forward as can be had."""
_SET_HERE = {"policy", "overlap", "adapt", "rule"}


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
    known = {name for method in methods for name in options_of(method).model_fields} - _SET_HERE
    for name in options.keys() - known:
        raise OptionError(unknown(f"option of {', '.join(methods)}", name, known))
    with load_decoder("ar", model) as plain:
        bench = Bench(plain.engine, options, samples, NEW, rounds, console, out)
        what = f"{', '.join(TASKS)}; {samples} samples of {NEW} tokens; {rounds} rounds"
        console.print(f"{model}; {bench.numbers['machine']}; drafts: {options.get('draft', 'lookup')}; {what}")
        with bench.stack:
            # The sides share the draft model: what it needs is had now or not at all.
            drafter = bench.side("the draft", "sd").decoder.drafter if {"sd", "mcsd", "seed"} & set(methods) else None
            generating = bool({"sd", "mcsd"} & set(methods)) and room_for_generate(bench, drafter)
            evaluations = _evaluations(bench, plain)
            thoughts = list(_thoughts())
            for temperature in temperatures:
                bench.compare(f"thoughts, T = {temperature}", _sides(bench, methods), thoughts, temperature)
            if {"sd", "mcsd"} & set(methods):
                for temperature in temperatures:
                    sides = _rules(bench, methods)
                    bench.compare(f"rules, T = {temperature}", sides, thoughts, temperature, against=(0,))
                bench.compare("state evaluations, T = 0.2", _by_lookup(bench), evaluations, 0.2, "evaluate")
                for temperature in temperatures if generating else ():
                    against_generate(bench, model, methods, thoughts, temperature)
            if "seed" in methods:
                by_purpose(bench, thoughts, evaluations)
                pictures(bench, thoughts[1])
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
        for rule in ("coupled", "mcsd"):
            sides.append(bench.side(f"{shown}, {rule}", "mcsd", k_config=config, rule=rule))
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
                max_tokens=bench.max_tokens,
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
