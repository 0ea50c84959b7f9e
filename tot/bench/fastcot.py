"""`tot bench fastcot`: what FastCoT saves and what it costs, in the shape of the paper's tables and figures.

First answers, all rationales packed: by iteration (figure 6), by window (figure 8), after corrupted rationales (figure
5), and the cap that a random half of the questions asks for (section 4.4). Then, on the other half, time: rationales
one at a time and packed (table 1), where it goes (table 2), and a forward by window (figure 2); and the evaluations of
a GSM8K search, explained in full and in part.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from tot.bench.engines import SPENT, metrics_of
from tot.bench.harness import SECONDS, Bench, Measured, Metric, Results, Side, by_metric, percent, timed
from tot.bench.workloads import grown
from tot.decoders.decoder import load_decoder
from tot.decoders.drafting.latency_model import engine_latency_model
from tot.decoders.engine.engine import Engine
from tot.decoders.engine.runner import Chunk, Runner
from tot.decoders.engine.sampling import Draw, read
from tot.decoders.local import LocalDecoder
from tot.decoders.methods.fastcot import Buffers
from tot.decoders.models.loading import load_model
from tot.decoders.request import Request, Sampling
from tot.evaluation.estimate import estimate
from tot.evaluators.likelihood import Explain
from tot.machine import describe
from tot.registry import load_task
from tot.report.plots import curves, save
from tot.training.fastcot import Answers, Rationale, by_iteration, corrupted, decode_whole, find_cap, questions

WINDOWS = (0, 5, 10, 15, 20, 25)
FORWARDS = tuple(range(0, 39, 2))
"""Windows of figure 2."""
SHARES = tuple(i / 10 for i in range(11))
TOGETHER = 8
"""Rationales decoded at once where they are packed."""
LOSS, AGREEMENT = 0.03, 0.9
"""Accuracy that a cap may lose, and the share of answers that have to stay as they are."""
_LENGTHS = (400, 600, 800)
_GREEDY = Draw(0.0, 0, 1.0, 0.0, 0, 0, 0)


def run(
    task: str,
    data: str,
    model: str,
    limit: int,
    timed_questions: int,
    max_tokens: int,
    seeds: int,
    out: Path,
    console: Console,
) -> None:
    """Measure, print the tables, and write the numbers to `out` and the pictures beside it."""
    asked = questions(task, data, limit, max_tokens, 0)
    calibrating, testing = asked[: len(asked) // 2], asked[len(asked) // 2 :]
    given = {"task": task, "data": data, "model": model, "limit": limit, "timed": timed_questions}
    given |= {"max_tokens": max_tokens, "seeds": seeds}
    with Engine(load_model(model)) as engine:
        width = Buffers(None, engine_latency_model(engine)).width(1)
        with Bench(console, out, f"{model}; {describe(engine.loaded.device, engine.loaded.dtype)}", given) as bench:
            bench.show(f"{task}: {len(asked)} questions, rationales of up to {max_tokens} tokens; window {width}")
            iterations = [*range(0, max_tokens + 1, max(1, max_tokens // 16))]
            found, note = find_cap(engine, calibrating, iterations, width, LOSS, AGREEMENT)
            bench.show(f"calibrated on {len(calibrating)} questions: {note}")
            bench.keep(window=width, calibration={"cap": found.cap, "note": note})
            cap = iterations[len(iterations) // 2] if found.cap is None else found.cap
            _by_iteration(bench, engine, testing, iterations, width, cap, out)
            _by_window(bench, engine, testing, iterations, out)
            _corruption(bench, engine, testing, seeds, out)
            _forwards(bench, engine, out)
            _times(bench, engine, testing[:timed_questions], width, cap)
            _state_evaluations(bench, engine, width, max_tokens)
        console.print(f"pictures: {out.with_suffix('')}*")


def _curve(answers: Sequence[Answers]) -> dict[str, list[float]]:
    return {"accuracy": [one.accuracy for one in answers], "agreement": [one.agreement for one in answers]}


def _picture(
    out: Path, name: str, lines: Mapping[str, tuple[Sequence[float], Sequence[float]]], *axes: Any, by: float = 100
) -> None:
    shown = {line: (x, [by * value for value in y]) for line, (x, y) in lines.items()}
    save(curves(shown, *axes), out.with_name(f"{out.stem}-{name}.png"))


def _by_iteration(
    bench: Bench,
    engine: Engine,
    asked: Sequence[Rationale],
    iterations: Sequence[int],
    width: int,
    cap: int,
    out: Path,
) -> None:
    """Figure 6: with approximate tokens, without them, and a rationale decoded one token a step and cut there."""
    decoded, token_by_token = decode_whole(engine, asked, width), decode_whole(engine, asked, 0)
    sides = {
        "FastCoT": by_iteration(engine, asked, decoded, iterations),
        "without by-products": by_iteration(engine, asked, decoded, iterations, glimpse=False),
        "cut after as many iterations of AR": by_iteration(engine, asked, token_by_token, iterations, glimpse=False),
    }
    none, at_cap = sides["FastCoT"][0], sides["FastCoT"][list(iterations).index(cap)]
    whole = [one.right(answer) for one, answer in zip(asked, none.whole, strict=True)]
    table = Table("answers after", "accuracy, mean over the curve", "answers unchanged, mean over the curve")
    found = {name: _curve(answers) for name, answers in sides.items()}
    for name, curve in found.items():
        table.add_row(name, *(f"{statistics.fmean(values):.1%}" for values in curve.values()))
    right, lucky, kept = (estimate(values).format(".0%") for values in (whole, none.scores, none.unchanged))
    bench.show(
        f"{len(asked)} other questions. Whole rationales: {right} right, "
        f"{sum(answer is None for answer in none.whole)} answers could not be read; no rationale: {lucky} right, "
        f"{kept} of the answers unchanged",
        table,
        f"cap {cap} there: {at_cap.against_whole()[0]}",
    )
    scores = {"cap": cap, "scores": at_cap.scores, "unchanged": at_cap.unchanged}
    bench.keep(**{"by iteration": {"iterations": iterations, **found}, "at the cap": scores})
    for what, level in {"accuracy": {"whole rationales": 100 * statistics.fmean(whole)}, "agreement": None}.items():
        lines = {name: (iterations, curve[what]) for name, curve in found.items()}
        _picture(out, what, lines, "iterations", f"{what} (%)", level)


def _by_window(bench: Bench, engine: Engine, asked: Sequence[Rationale], iterations: Sequence[int], out: Path) -> None:
    """Figure 8."""
    found = {
        f"c = {window}": _curve(by_iteration(engine, asked, decode_whole(engine, asked, window), iterations))
        for window in WINDOWS
    }
    bench.keep(**{"by window": found})
    lines = {name: (iterations, curve["agreement"]) for name, curve in found.items()}
    _picture(out, "windows", lines, "iterations", "answers unchanged (%)")


def _corruption(bench: Bench, engine: Engine, asked: Sequence[Rationale], seeds: int, out: Path) -> None:
    """Figure 5: half of the rationales masked from the end, half uniformly, by what is left."""
    left = [1 - share_hidden for share_hidden in SHARES]
    pairs = corrupted(engine, asked, SHARES, seeds)
    ways = ("masked from the end", "masked uniformly")
    found = {way: _curve(answers) for way, answers in zip(ways, zip(*pairs, strict=True), strict=True)}
    bench.keep(corruption={"left": left, **found})
    lines = {way: (left, curve["agreement"]) for way, curve in found.items()}
    _picture(out, "masked", lines, "share of the rationale left", "answers unchanged (%)")


def _forwards(bench: Bench, engine: Engine, out: Path) -> None:
    """Figure 2: one forward after prompts of three lengths, by window."""
    fitting = [length for length in _LENGTHS if length + FORWARDS[-1] < engine.runner.context]
    prompts = {length: [5 + i % 50 for i in range(length)] for length in fitting}
    found = {
        f"prompt of {length} tokens": engine.call(partial(forward_seconds, engine.runner, prompt, 5))
        for length, prompt in prompts.items()
    }
    bench.keep(forwards={"windows": FORWARDS, **found})
    lines = {name: (FORWARDS, seconds) for name, seconds in found.items()}
    _picture(out, "forward", lines, "context window", "milliseconds a forward", by=1000)


def forward_seconds(runner: Runner, prompt: Sequence[int], rounds: int) -> list[float]:
    """Of a forward and of reading it, by window: medians over rounds, of which one more warms up."""
    cache = runner.cache
    base = cache.open()
    spent: list[list[float]] = []
    try:
        cache.extend(base, prompt)
        runner.forward([Chunk(base, cache.computed_length(base), len(base), [_GREEDY])])
        for _ in range(rounds + 1):
            spent.append([])
            for window in FORWARDS:
                fork = cache.fork(base)
                cache.extend(fork, [60 + i for i in range(window + 1)])
                draws = [_GREEDY] * (window + 1)
                chunk = Chunk(fork, len(base), len(fork), draws)
                seconds, _ = timed(lambda: read(runner.forward([chunk]).logits, draws))  # noqa: B023  (waits for a GPU)
                spent[-1].append(seconds)
                cache.rollback(fork, 0)
    finally:
        cache.rollback(base, 0)
    return [statistics.median(times) for times in zip(*spent[1:], strict=True)]


def _times(bench: Bench, engine: Engine, asked: Sequence[Rationale], window: int, cap: int) -> None:
    """Tables 1 and 2: the same questions, one at a time and packed."""
    cut: Mapping[str, Any] = {"window": window, "cap": cap}
    cot, fastcot = load_decoder("ar", engine=engine), load_decoder("fastcot", engine=engine, **cut)
    none = load_decoder("fastcot", engine=engine, cap=0)
    alone = {
        "CoT": cot,
        "FastCoT": fastcot,
        "FastCoT, no cap": load_decoder("fastcot", engine=engine, window=window),
        "FastCoT, 3 looks alike": load_decoder("fastcot", engine=engine, window=window, stable=3, every=4),
        "no rationale": none,
    }

    def answered(decoder: LocalDecoder, batch: Sequence[Rationale]) -> Measured:
        engine.call(engine.accounts.clear)
        seconds, done = timed(lambda: decoder.generate([one.request for one in batch]))
        answers = [one.answer(completion) for one, completion in zip(batch, done, strict=True)]
        return {
            "seconds": seconds,
            "right": statistics.fmean(one.right(answer) for one, answer in zip(batch, answers, strict=True)),
            "answers": [_read(one, answer) for one, answer in zip(batch, answers, strict=True)],
            "iterations": sum(completion.usage.forwards for completion in done),
            "saved": sum(completion.usage.accepted for completion in done),
            "spent": dict(metrics_of(engine, "answer").seconds),
        }

    def batch(together: int, turn: int) -> Sequence[Rationale]:
        """With its prompts computed: that decoder decodes next to nothing."""
        found = asked[turn * together : (turn + 1) * together]
        none.generate([one.request for one in found])
        return found

    def table(results: Results) -> Table:
        """With the share of the answers that are those of CoT."""
        for cell in results.cells:
            base = results.of("CoT").get(cell["round"], cell)
            cell["same"] = statistics.fmean(a == b for a, b in zip(cell["answers"], base["answers"], strict=True))
        return by_metric(results, _TIMES, ["CoT"], f"{len(asked)} questions, cap {cap}, seconds of each turn")

    for together, decoders in {1: alone, TOGETHER: {"CoT": cot, "FastCoT": fastcot}}.items():
        bench.compare(
            f"rationales, {together} at a time",
            [Side(name, partial(answered, decoder)) for name, decoder in decoders.items()],
            lambda _, turn, together=together: batch(together, turn),  # type: ignore[misc]
            rounds=-(-len(asked) // together),
            warm_up=lambda _, together=together: batch(together, 0),  # type: ignore[misc]
            table=table,
        )


def _read(one: Rationale, answer: Any) -> str | None:
    return None if answer is None else str(one.task.canonical(answer))


_TIMES = [
    SECONDS,
    Metric("in all", lambda took: took["seconds"], lambda values: f"{sum(values):.1f}"),
    Metric("accuracy", lambda took: took["right"], percent),
    Metric("answers of CoT", lambda took: took["same"], percent),
    Metric("iterations", lambda took: took["iterations"], lambda values: f"{sum(values):.0f}"),
    Metric("saved", lambda took: took["saved"], lambda values: f"{sum(values):.0f}"),
    *SPENT,
]


def _state_evaluations(bench: Bench, engine: Engine, window: int, max_tokens: int) -> None:
    """Values of GSM8K's first thoughts after whole explanations and after parts of them, siblings packed."""
    task, evaluator = load_task("gsm8k"), Explain()
    sampling = Sampling(max_tokens=max_tokens, stop=("\n\n",))
    plain = load_decoder("ar", engine=engine)
    groups: list[list[Request]] = []
    for number, row in enumerate(task.data("questions")):
        states = grown(plain, task, task.question_of(row), number, thoughts=3, breadth=1, depth=2)
        groups.append([evaluator.request(task, evaluator.prompt(task, state), sampling) for state in states])

    def explained(decoder: LocalDecoder, asked: Sequence[Request]) -> Measured:
        seconds, done = timed(lambda: decoder.generate(asked))
        return {"seconds": seconds, "values": [evaluator.value(task, each) or 0.0 for each in done]}

    def asking(_: Any, turn: int) -> list[Request]:
        """With its prompts computed."""
        plain.generate([one.model_copy(update={"answer_trigger": None}) for one in groups[turn]])
        return groups[turn]

    sides = [Side("whole explanations", partial(explained, plain))]
    for cap in filter(None, (max_tokens // 16, max_tokens // 8, max_tokens // 4, max_tokens // 2)):
        cutting = load_decoder("fastcot", engine=engine, window=window, cap=cap)
        sides.append(Side(f"cap {cap}", partial(explained, cutting)))
    whole = sides[0].name
    results = bench.compare("GSM8K state evaluations", sides, asking, rounds=len(groups), against=[whole])
    values = {
        side.name: [value for cell in results.of(side.name).values() for value in cell["values"]] for side in sides
    }
    for name, found in values.items():
        if name != whole and min(len(set(found)), len(set(values[whole]))) > 1:
            bench.show(f"{name}: correlation of values {statistics.correlation(found, values[whole]):.2f}")
