"""`tot bench fastcot`: what FastCoT saves and what it costs, in the shape of the paper's tables and figures.

First answers, all rationales packed: by iteration (figure 6), by window (figure 8), after corrupted rationales (figure
5), and the cap that a random half of the questions asks for (section 4.4). Then, on the other half, time: rationales
one at a time and packed, all sides in turns (table 1), where it goes (table 2), and a forward by window (figure 2);
and the evaluations of a GSM8K search, explained in full and in part.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from tot.bench.machine import interval, share, spread
from tot.data import rows
from tot.decoders.decoder import load_decoder
from tot.decoders.drafting.latency_model import engine_latency_model
from tot.decoders.engine.engine import Engine
from tot.decoders.engine.runner import Chunk, Runner
from tot.decoders.engine.sampling import Draw
from tot.decoders.errors import OptionError
from tot.decoders.files import write_json
from tot.decoders.local import LocalDecoder
from tot.decoders.methods.fastcot import Buffers
from tot.decoders.models.loading import load_model
from tot.decoders.request import Completion, Request, Sampling
from tot.evaluators.model import Explain
from tot.machine import describe
from tot.registry import load_task
from tot.report.plots import curves, save
from tot.search import BFS
from tot.solver import solve
from tot.training.fastcot import (
    Answers,
    Calibration,
    Rationale,
    by_iteration,
    calibrate,
    corrupted,
    decode_whole,
    rationales,
)

WINDOWS = (0, 5, 10, 15, 20, 25)
SHARES = tuple(i / 10 for i in range(11))
TOGETHER = 8
"""Rationales decoded at once where they are packed."""
_LENGTHS = (400, 600, 800)
_GREEDY = Draw(0.0, 0, 1.0, 0.0, 0, 0, 0)


@dataclass
class Side:
    """A way to get answers, and what was measured of it."""

    name: str
    decoder: LocalDecoder
    together: int = 1
    seconds: list[float] = field(default_factory=list)
    """By batch of questions."""
    completions: list[Completion] = field(default_factory=list)

    def ask(self, asked: Sequence[Rationale]) -> None:
        self.decode([one.request for one in asked])

    def decode(self, requests: Sequence[Request]) -> None:
        began = time.perf_counter()
        completions = self.decoder.generate(requests)
        self.seconds.append(time.perf_counter() - began)
        self.completions += completions

    @property
    def iterations(self) -> int:
        return sum(completion.usage.forwards for completion in self.completions)


def questions(task_name: str, data: str, limit: int | None, max_tokens: int, seed: int) -> list[Rationale]:
    """The rationales of a random choice of rows."""
    chosen = list(rows(data))
    random.Random(seed).shuffle(chosen)
    asked = rationales(load_task(task_name), islice(chosen, limit), max_tokens)
    if len(asked) < 2:
        raise OptionError(f"{data} has {len(asked)} rows: give a file with more")
    return asked


def find_cap(
    engine: Engine, asked: Sequence[Rationale], iterations: Sequence[int], window: int, loss: float, agreement: float
) -> tuple[Calibration, str]:
    """The cap that these questions ask for, and how sure that is, in words."""
    answers = by_iteration(engine, asked, decode_whole(engine, asked, window), iterations)
    found = calibrate(iterations, answers, loss, agreement)
    if found.cap is None:
        return found, f"no cap keeps accuracy within {100 * loss:g} points and {100 * agreement:g}% of the answers"
    note, low = _against_whole(answers[list(iterations).index(found.cap)])
    if low < -loss:
        note += f"; {len(asked)} questions are too few to be sure of {100 * loss:g} points"
    return found, f"cap {found.cap}: {note}"


def _against_whole(answers: Answers) -> tuple[str, float]:
    """Accuracy and answers beside those of whole rationales, in words; and the lower end of the difference."""
    full = [one.right(answer) for one, answer in zip(answers.asked, answers.whole, strict=True)]
    low, high = interval([ours - theirs for ours, theirs in zip(answers.scores, full, strict=True)])
    note = (
        f"accuracy {share(answers.scores)}, of whole rationales {share(full)}, difference {100 * low:.0f} to "
        f"{100 * high:.0f} points; {share(answers.unchanged)} of the answers unchanged"
    )
    return note, low


def run(
    task: str,
    data: str,
    model: str,
    limit: int,
    timed: int,
    max_tokens: int,
    window: int | None,
    loss: float,
    agreement: float,
    seeds: int,
    out: Path,
    console: Console,
) -> None:
    """Measure, print the tables, and write the numbers to `out` and the pictures beside it."""
    asked = questions(task, data, limit, max_tokens, 0)
    calibrating, testing = asked[: len(asked) // 2], asked[len(asked) // 2 :]
    with Engine(load_model(model)) as engine:
        width = Buffers(window, None if window is not None else engine_latency_model(engine)).width(1)
        console.print(
            f"{model}; {describe(engine.loaded.device, engine.loaded.dtype)}; {task}: {len(asked)} questions, "
            f"rationales of up to {max_tokens} tokens; window {width}"
        )
        numbers: dict[str, Any] = {"machine": describe(engine.loaded.device, engine.loaded.dtype), "window": width}
        iterations = [*range(0, max_tokens + 1, max(1, max_tokens // 16))]
        found, note = find_cap(engine, calibrating, iterations, width, loss, agreement)
        console.print(f"calibrated on {len(calibrating)} questions: {note}")
        numbers["calibration"] = {"cap": found.cap, "note": note}
        cap = iterations[len(iterations) // 2] if found.cap is None else found.cap
        _by_iteration(engine, testing, iterations, width, cap, numbers, out, console)
        _by_window(engine, testing, iterations, numbers, out)
        _corruption(engine, testing, seeds, numbers, out)
        _forwards(engine, numbers, out)
        _times(engine, testing[:timed], width, cap, numbers, console)
        _state_evaluations(engine, width, max_tokens, numbers, console)
    write_json(out, numbers)
    console.print(f"numbers and pictures: {out.with_suffix('')}*")


def _by_iteration(
    engine: Engine,
    asked: Sequence[Rationale],
    iterations: Sequence[int],
    width: int,
    cap: int,
    numbers: dict[str, Any],
    out: Path,
    console: Console,
) -> None:
    """Figure 6: with approximate tokens, without them, and a rationale decoded one token a step and cut there."""
    decoded, token_by_token = decode_whole(engine, asked, width), decode_whole(engine, asked, 0)
    sides = {
        "FastCoT": by_iteration(engine, asked, decoded, iterations),
        "without by-products": by_iteration(engine, asked, decoded, iterations, glimpse=False),
        "cut after as many iterations of AR": by_iteration(engine, asked, token_by_token, iterations, glimpse=False),
    }
    whole = [one.right(answer) for one, answer in zip(asked, sides["FastCoT"][0].whole, strict=True)]
    unread = sum(answer is None for answer in sides["FastCoT"][0].whole)
    table = Table("answers after", "accuracy, mean over the curve", "answers unchanged, mean over the curve")
    for name, answers in sides.items():
        numbers[f"by iteration: {name}"] = {
            "iterations": list(iterations),
            "accuracy": [found.accuracy for found in answers],
            "agreement": [found.agreement for found in answers],
        }
        means = [statistics.fmean(getattr(found, what) for found in answers) for what in ("accuracy", "agreement")]
        table.add_row(name, *(f"{100 * mean:.1f}%" for mean in means))
    none = sides["FastCoT"][0]
    console.print(
        f"{len(asked)} other questions. Whole rationales: {share(whole)} right, {unread} answers could not be read; no "
        f"rationale: {share(none.scores)} right, {share(none.unchanged)} of the answers unchanged"
    )
    console.print(table)
    at_cap = sides["FastCoT"][list(iterations).index(cap)]
    numbers["at the cap"] = {"cap": cap, "scores": at_cap.scores, "unchanged": at_cap.unchanged}
    console.print(f"cap {cap} there: {_against_whole(at_cap)[0]}")
    for what in ("accuracy", "agreement"):
        lines = {
            name: (list(iterations), [100 * getattr(found, what) for found in answers])
            for name, answers in sides.items()
        }
        level = {"whole rationales": 100 * statistics.fmean(whole)} if what == "accuracy" else None
        save(curves(lines, "iterations", f"{what} (%)", level), out.with_name(f"{out.stem}-{what}.png"))


def _by_window(
    engine: Engine, asked: Sequence[Rationale], iterations: Sequence[int], numbers: dict[str, Any], out: Path
) -> None:
    """Figure 8."""
    lines = {}
    for window in WINDOWS:
        answers = by_iteration(engine, asked, decode_whole(engine, asked, window), iterations)
        lines[f"c = {window}"] = (list(iterations), [100 * found.agreement for found in answers])
        numbers[f"by iteration, window {window}"] = {
            "accuracy": [found.accuracy for found in answers],
            "agreement": [found.agreement for found in answers],
        }
    save(curves(lines, "iterations", "answers unchanged (%)"), out.with_name(f"{out.stem}-windows.png"))


def _corruption(engine: Engine, asked: Sequence[Rationale], seeds: int, numbers: dict[str, Any], out: Path) -> None:
    """Figure 5: half of the rationales masked from the end, half uniformly, by what is left."""
    found = corrupted(engine, asked, SHARES, seeds)
    left = [1 - share_hidden for share_hidden in SHARES]
    lines = {
        name: (left, [100 * pair[which].agreement for pair in found])
        for which, name in enumerate(("masked from the end", "masked uniformly"))
    }
    numbers["corruption"] = {
        "left": left,
        "accuracy": [[answers.accuracy for answers in pair] for pair in found],
        "agreement": [[answers.agreement for answers in pair] for pair in found],
    }
    save(curves(lines, "share of the rationale left", "answers unchanged (%)"), out.with_name(f"{out.stem}-masked.png"))


def _forwards(engine: Engine, numbers: dict[str, Any], out: Path) -> None:
    """Figure 2: one forward after prompts of three lengths, by window."""
    windows = [*range(0, 39, 2)]
    lines: dict[str, tuple[Sequence[float], Sequence[float]]] = {}
    for length in (length for length in _LENGTHS if length + windows[-1] < engine.runner.context):
        seconds = engine.call(partial(_forward_seconds, engine.runner, length, windows))
        numbers[f"forward, prompt of {length}"] = dict(zip(map(str, windows), seconds, strict=True))
        lines[f"prompt of {length} tokens"] = windows, [1000 * value for value in seconds]
    save(curves(lines, "context window", "milliseconds a forward"), out.with_name(f"{out.stem}-forward.png"))


def _forward_seconds(runner: Runner, length: int, windows: Sequence[int]) -> list[float]:
    """Medians of five, the windows in turns."""
    cache = runner.cache
    base = cache.open()
    spent: dict[int, list[float]] = {window: [] for window in windows}
    try:
        cache.extend(base, [5 + i % 50 for i in range(length)])
        runner.forward([Chunk(base, cache.computed_length(base), len(base), [_GREEDY])])
        for _ in range(6):
            for window in windows:
                fork = cache.fork(base)
                cache.extend(fork, [60 + i for i in range(window + 1)])
                began = time.perf_counter()
                runner.forward([Chunk(fork, len(base), len(fork), [_GREEDY] * (window + 1))])
                spent[window].append(time.perf_counter() - began)
                cache.rollback(fork, 0)
    finally:
        cache.rollback(base, 0)
    return [statistics.median(spent[window][1:]) for window in windows]


def _times(
    engine: Engine, asked: Sequence[Rationale], window: int, cap: int, numbers: dict[str, Any], console: Console
) -> None:
    """Tables 1 and 2: the same questions, one at a time and packed, all sides in turns."""
    given: Mapping[str, Any] = {"window": window, "cap": cap}
    sides = [
        Side("CoT", load_decoder("ar", engine=engine)),
        Side("FastCoT", load_decoder("fastcot", engine=engine, **given)),
        Side("FastCoT, no cap", load_decoder("fastcot", engine=engine, window=window)),
        Side("FastCoT, 3 looks alike", load_decoder("fastcot", engine=engine, window=window, stable=3, every=4)),
        Side("no rationale", load_decoder("fastcot", engine=engine, cap=0)),
        Side(f"CoT, {TOGETHER} packed", load_decoder("ar", engine=engine), TOGETHER),
        Side(f"FastCoT, {TOGETHER} packed", load_decoder("fastcot", engine=engine, **given), TOGETHER),
    ]
    prompts = sides[4]  # decodes next to nothing, so it computes the prompts
    for side in sides:  # a warm-up
        side.decoder.generate([one.request for one in asked[: side.together]])
    accounts: dict[str, dict[str, float]] = {}
    for together in sorted({side.together for side in sides}):
        for start in range(0, len(asked), together):
            batch = asked[start : start + together]
            prompts.decoder.generate([one.request for one in batch])
            for side in (side for side in sides if side.together == together):
                engine.accounts.clear()
                side.ask(batch)
                seconds = accounts.setdefault(side.name, {})
                for name, value in engine.accounts["answer"].seconds.items():
                    seconds[name] = seconds.get(name, 0.0) + value
    table = Table(
        "", "seconds", "saved", "of all", "accuracy", "loss, points", "answers of CoT", "iterations saved / total"
    )
    for side in sides:
        cot = sides[0] if side.together == 1 else sides[5]
        answers = [one.answer(completion) for one, completion in zip(asked, side.completions, strict=True)]
        theirs = [one.answer(completion) for one, completion in zip(asked, cot.completions, strict=True)]
        scores = [one.right(answer) for one, answer in zip(asked, answers, strict=True)]
        lost = [one.right(answer) - score for one, answer, score in zip(asked, theirs, scores, strict=True)]
        same = [float(one.same(a, b)) for one, a, b in zip(asked, answers, theirs, strict=True)]
        saved = statistics.median(1 - ours / other for ours, other in zip(side.seconds, cot.seconds, strict=True))
        saved_in_all = 1 - sum(side.seconds) / sum(cot.seconds)
        low, high = interval(lost)
        hits = sum(completion.usage.accepted for completion in side.completions)
        table.add_row(
            side.name,
            spread(side.seconds),
            f"{100 * saved:.0f}%",
            f"{100 * saved_in_all:.0f}%",
            share(scores),
            f"{100 * statistics.fmean(lost):.0f} ({100 * low:.0f} to {100 * high:.0f})",
            share(same),
            f"{hits} / {side.iterations}",
        )
        numbers[f"table 1: {side.name}"] = {
            "seconds": side.seconds,
            "saved": saved,
            "saved in all": saved_in_all,
            "scores": scores,
            "unchanged": same,
            "iterations_saved": hits,
            "iterations": side.iterations,
        }
    console.print(
        f"{len(asked)} of those, cap {cap}: seconds a question, or a batch of {TOGETHER} (median, and the range); "
        "saved by the median one, and of all seconds"
    )
    console.print(table)
    _composition(accounts, numbers, console)


def _state_evaluations(engine: Engine, window: int, max_tokens: int, numbers: dict[str, Any], console: Console) -> None:
    """Values of GSM8K's first thoughts after whole explanations and after parts of them, siblings packed."""
    task, evaluator = load_task("gsm8k"), Explain()
    sampling = Sampling(max_tokens=max_tokens, stop=("\n\n",))
    whole = Side("whole explanations", load_decoder("ar", engine=engine))
    groups = []
    for number, row in enumerate(task.data("questions")):
        search, question = BFS(thoughts=3, breadth=1, depth=2), task.question_of(row)
        tree = solve(task, question, decoder=whole.decoder, search=search, evaluator="random", seed=number).tree
        prompts = [evaluator.prompt(task, tree.state(node)) for node in tree if node.parent is not None]
        groups.append([evaluator.request(task, prompt, sampling) for prompt in prompts])
    caps = [max_tokens // 16, max_tokens // 8, max_tokens // 4, max_tokens // 2]
    sides = [whole] + [
        Side(f"cap {cap}", load_decoder("fastcot", engine=engine, window=window, cap=cap)) for cap in caps if cap
    ]
    for group in groups:
        whole.decoder.generate([one.model_copy(update={"answer_trigger": None}) for one in group])  # the prompts
        for side in sides:
            side.decode(group)
    values = {side.name: [evaluator.value(task, each) or 0.0 for each in side.completions] for side in sides}
    table = Table("GSM8K state evaluations", "seconds", "times as fast", "correlation of values")
    for side in sides:
        ratio = statistics.median(b / a for a, b in zip(side.seconds, whole.seconds, strict=True))
        pair = values[side.name], values[whole.name]
        fixed = any(len(set(some)) < 2 for some in pair)
        correlation = float("nan") if fixed else statistics.correlation(*pair)
        table.add_row(side.name, spread(side.seconds), f"{ratio:.2f}x", f"{correlation:.2f}")
        numbers[f"state evaluations: {side.name}"] = {
            "seconds": side.seconds,
            "ratio": ratio,
            "correlation": correlation,
            "values": values[side.name],
        }
    console.print(table)


_PARTS = {"verify": "inference", "sampling": "decode", "draft": "buffer", "scheduling": "other"}
"""Our names of what takes time, and the paper's for what is next to it. Nothing is padded, and no key is stripped."""


def _composition(accounts: Mapping[str, Mapping[str, float]], numbers: dict[str, Any], console: Console) -> None:
    """Table 2."""
    table = Table("", *_PARTS.values(), "padding", "strip KV", "total, seconds")
    for name, seconds in accounts.items():
        values = [seconds.get(part, 0.0) for part in _PARTS]
        table.add_row(name, *(f"{value:.2f}" for value in values), "0", "0", f"{sum(values):.2f}")
        numbers[f"table 2: {name}"] = dict(zip(_PARTS.values(), values, strict=True))
    console.print(table)
