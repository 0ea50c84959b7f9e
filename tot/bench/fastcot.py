"""`tot bench fastcot`: what FastCoT saves and what it costs, in the shape of the paper's tables.

The cap that a random half of the questions asks for (section 4.4); on the other half answers by iteration (figure 6)
and window (figure 8), and after rationales of which parts are masked (figure 5); then time: rationales one at a time
and packed (table 1), and where it goes (table 2); and the evaluations of a GSM8K search, explained in full and in part.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from rich.console import Console
from rich.table import Table

from tot.bench.engines import SPENT, about, metrics_of
from tot.bench.harness import SECONDS, Bench, Measured, Metric, Results, Side, by_metric, percent, timed
from tot.bench.options import FastCoTOptions
from tot.bench.workloads import grown
from tot.decoders.decoder import load_decoder
from tot.decoders.drafting.latency_model import engine_latency_model
from tot.decoders.engine.engine import Engine
from tot.decoders.local import LocalDecoder
from tot.decoders.methods.fastcot import Buffers
from tot.decoders.request import Request, Sampling
from tot.evaluation.estimate import bootstrap
from tot.evaluators.likelihood import Explain
from tot.registry import load_task
from tot.training.fastcot import Answers, Rationale, by_iteration, decode_whole, find_cap, masked, questions

WINDOWS = (0, 5, 10, 15, 20, 25)
SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)
"""Of rationales, that are masked."""
TOGETHER = 8
"""Rationales decoded at once where they are packed."""
LOSS, AGREEMENT = 0.03, 0.9
"""Accuracy that a cap may lose, and the share of answers that have to stay as they are."""


def run(options: FastCoTOptions, console: Console) -> None:
    """Measure, and print the tables."""
    asked = questions(options.task, options.data, options.limit, options.max_tokens, 0)
    calibrating, testing = asked[: len(asked) // 2], asked[len(asked) // 2 :]
    most = options.max_tokens
    with load_decoder("ar", options.model, **options.computed) as plain:
        engine = plain.engine
        width = Buffers(None, engine_latency_model(engine)).width(1)
        machine = f"{options.model}; {about(engine)}"
        with Bench(options, console, machine) as bench:
            bench.show(f"{options.task}: {len(asked)} questions, rationales of up to {most} tokens; window {width}")
            iterations = [*range(0, most + 1, max(1, most // 16))]
            found, note = find_cap(engine, calibrating, iterations, width, LOSS, AGREEMENT)
            bench.show(f"calibrated on {len(calibrating)} questions: {note}")
            bench.keep(window=width, calibration={"cap": found.cap, "note": note})
            cap = iterations[len(iterations) // 2] if found.cap is None else found.cap
            if "answers" in options.parts:
                _by_iteration(bench, engine, testing, iterations, width, cap)
                _by_window(bench, engine, testing, iterations)
            if "masks" in options.parts:
                _masked(bench, engine, testing, options.seeds)
            if "times" in options.parts:
                _times(bench, engine, testing[: options.timed], width, cap)
            if "evaluations" in options.parts:
                _state_evaluations(bench, engine, width, most)


def _by_iteration(
    bench: Bench, engine: Engine, asked: Sequence[Rationale], iterations: Sequence[int], width: int, cap: int
) -> None:
    """Figure 6: with approximate tokens, without them, and a rationale decoded one token a step and cut there."""
    decoded, token_by_token = decode_whole(engine, asked, width), decode_whole(engine, asked, 0)
    sides = {
        "FastCoT": by_iteration(engine, asked, decoded, iterations),
        "without by-products": by_iteration(engine, asked, decoded, iterations, glimpse=False),
        "cut after as many iterations of AR": by_iteration(engine, asked, token_by_token, iterations, glimpse=False),
    }
    none, *_, full = sides["FastCoT"]
    (at_cap,) = by_iteration(engine, asked, decoded, [cap])
    bench.show(
        f"{len(asked)} other questions, of {sum(answer is None for answer in full.whole)} no answer can be read after "
        f"whole rationales. cap {cap}: {at_cap.against_whole()[0]}. No rationale: {none.against_whole()[0]}"
    )
    _curves(bench, "iterations", iterations, sides)
    bench.keep(**{"at the cap": {"scores": at_cap.scores, "unchanged": at_cap.unchanged}})


def _by_window(bench: Bench, engine: Engine, asked: Sequence[Rationale], iterations: Sequence[int]) -> None:
    """Figure 8: by window, accuracy on average over caps; and what of it the approximate tokens are worth, and the
    window, beside a rationale that is only cut after as many iterations."""
    rows = Table("window", "accuracy", "minus without by-products", "minus cut", title="by window, over all iterations")
    cut: list[float] = []
    for window in WINDOWS:
        decoded = decode_whole(engine, asked, window)
        shown, hidden = (
            _over_iterations(by_iteration(engine, asked, decoded, iterations, glimpse=glimpse))
            for glimpse in (True, False)
        )
        cut = cut or hidden
        gains = [bootstrap([a - b for a, b in zip(shown, other, strict=True)]) for other in (hidden, cut)]
        bench.keep(**{f"window {window}": {"accuracy": shown, "without by-products": hidden}})
        rows.add_row(str(window), f"{statistics.fmean(shown):.1%}", *(gain.format("+.1%") for gain in gains))
    bench.show(rows)


def _over_iterations(answers: Sequence[Answers]) -> list[float]:
    """The mean score of each question."""
    return [statistics.fmean(scores) for scores in zip(*(one.scores for one in answers), strict=True)]


def _masked(bench: Bench, engine: Engine, asked: Sequence[Rationale], seeds: int) -> None:
    """Figure 5: rationales masked from the end, and uniformly."""
    pairs = masked(engine, asked, SHARES, seeds)
    sides = dict(zip(("masked from the end", "masked uniformly"), zip(*pairs, strict=True), strict=True))
    _curves(bench, "the share left", [f"{1 - share:.0%}" for share in SHARES], sides)


def _curves(bench: Bench, after: str, at: Sequence[Any], sides: Mapping[str, Sequence[Answers]]) -> None:
    """A table of accuracy, and one of answers that are those after whole rationales."""
    numbers: dict[str, Any] = {"at": at}
    for what in ("accuracy", "agreement"):
        table = Table(f"{what} after {after}", *map(str, at), "mean")
        for name, answers in sides.items():
            curve = numbers[f"{name}, {what}"] = [getattr(one, what) for one in answers]
            table.add_row(name, *(f"{value:.0%}" for value in curve), f"{statistics.fmean(curve):.1%}")
        bench.show(table)
    bench.keep(**{after: numbers})


def _times(bench: Bench, engine: Engine, asked: Sequence[Rationale], window: int, cap: int) -> None:
    """Tables 1 and 2: the same questions, one at a time and packed."""
    cut: Mapping[str, Any] = {"window": window, "cap": cap}
    cot, fastcot = load_decoder("ar", engine=engine), load_decoder("fastcot", engine=engine, **cut)
    none = load_decoder("fastcot", engine=engine, cap=0)
    alone = {
        "CoT": cot,
        "FastCoT": fastcot,
        "FastCoT, no cap": load_decoder("fastcot", engine=engine, window=window),
        "cut": load_decoder("fastcot", engine=engine, window=0, cap=cap, glimpse=False),
        **{f"window {c}": load_decoder("fastcot", engine=engine, window=c, cap=cap) for c in WINDOWS},
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
