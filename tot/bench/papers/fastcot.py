"""`tot bench fastcot`: what FastCoT saves and what it costs, in the shape of the paper's tables.

The cap that a random half of the questions asks for (section 4.4); on the other half answers by iteration (figure 6)
and window (figure 8), and after rationales of which parts are masked (figure 5); then time: rationales one at a time
and packed (table 1), and where it goes (table 2).
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

from rich.console import Console
from rich.table import Table

from tot.bench.engines import SPENT, about, metrics_of
from tot.bench.harness import SECONDS, Bench, Measured, Measurements, Metric, Side, by_metric, percent, timed
from tot.bench.options import FastCoTBench as Asked
from tot.decoders.decoder import LocalDecoder, load_decoder
from tot.decoders.engine.engine import Engine
from tot.decoders.methods.options import FastCoTOptions
from tot.evaluation.estimate import bootstrap
from tot.training.fastcot import Answers, Rationale, batches, by_iteration, decode_whole, find_cap, masked, questions

WINDOWS = (0, 5, 10, 15, 20, 25)
SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)
"""Of rationales, that are masked."""
TOGETHER = 8
"""Rationales decoded at once where they are packed."""
LOSS, AGREEMENT = 0.03, 0.9
"""Accuracy that a cap may lose, and the share of answers that have to stay as they are."""
Answering = Callable[[Sequence[Rationale]], list[Answers]]
Curves = dict[str, list[Answers]]
"""Of each side, the answers at each of its places."""


def run(options: Asked, console: Console) -> None:
    """Measure, and print the tables."""
    asked = questions(options.task, options.data, options.limit, options.max_tokens, 0, options.prompts == "chat")
    calibrating, testing = asked[: len(asked) // 2], asked[len(asked) // 2 :]
    most = options.max_tokens
    with load_decoder("ar", options.model, **options.computed) as plain:
        engine = plain.engine
        machine = f"{options.model}; {about(engine)}"
        with Bench(options, console, machine) as bench:
            width = bench.numbers.setdefault("window", FastCoTOptions().window)
            bench.show(f"{options.task}: {len(asked)} questions, rationales of up to {most} tokens; window {width}")
            iterations = [*range(0, most + 1, max(1, most // 16))]
            sides = {"FastCoT": partial(_around, engine, iterations, width, (True,))}
            shown = partial(_curves, "accuracy", "iterations", iterations)
            curve = _answers(bench, "calibration", calibrating, sides, shown)["FastCoT"]
            found, note = find_cap(iterations, curve, LOSS, AGREEMENT)
            bench.show(f"calibrated on {len(calibrating)} questions: {note}")
            bench.keep(cap=found.cap)
            cap = iterations[len(iterations) // 2] if found.cap is None else found.cap
            if "answers" in options.parts:
                _by_window(bench, engine, testing, iterations, width, cap)
            if "masks" in options.parts:
                _masked(bench, engine, testing, options.seeds)
            if "times" in options.parts:
                _times(bench, engine, testing[: options.timed], width, cap)


def _answers(
    bench: Bench,
    title: str,
    asked: Sequence[Rationale],
    sides: Mapping[str, Answering],
    table: Callable[[Curves], Table],
) -> Curves:
    """Ask all sides in batches, of which those that are done are kept."""
    parts = batches(asked)

    def answered(side: Answering, batch: Sequence[Rationale]) -> Measured:
        seconds, found = timed(lambda: side(batch))
        return {"seconds": seconds, "answers": [asdict(one) for one in found]}

    def curves(results: Measurements) -> Curves:
        done = {side: [took["answers"] for _, took in sorted(results.of(side).items())] for side in results.sides}
        return {
            side: [Answers.joined([Answers(**batch) for batch in place]) for place in zip(*some, strict=True)]
            for side, some in done.items()
        }

    return curves(
        bench.compare(
            title,
            [Side(name, partial(answered, side)) for name, side in sides.items()],
            lambda _, turn: parts[turn],
            rounds=len(parts),
            table=lambda results: table(curves(results)),
        )
    )


def _around(
    engine: Engine, iterations: Sequence[int], window: int, glimpses: Sequence[bool], batch: Sequence[Rationale]
) -> list[Answers]:
    """Answers by iteration, with and without approximate tokens, one after another."""
    decoded = decode_whole(engine, batch, window)
    return [one for glimpse in glimpses for one in by_iteration(engine, batch, decoded, iterations, glimpse)]


def _by_window(
    bench: Bench, engine: Engine, asked: Sequence[Rationale], iterations: Sequence[int], width: int, cap: int
) -> None:
    """Figure 8: by window, accuracy on average over caps; and what of it the approximate tokens are worth, and the
    window, beside a rationale that is only cut after as many iterations. Figure 6: the caps apart, of one window."""
    both, count = (True, False), len(iterations)

    def table(found: Curves) -> Table:
        rows = Table(
            "window", "accuracy", "minus without by-products", "minus cut", title="by window, over all iterations"
        )
        cut = _over_iterations(found[_named(0)][count:])
        for name, curve in found.items():
            shown, hidden = _over_iterations(curve[:count]), _over_iterations(curve[count:])
            pairs = (zip(shown, other, strict=False) for other in (hidden, cut))  # of what both have come to
            gains = [bootstrap([a - b for a, b in pair]) for pair in pairs]
            rows.add_row(name, f"{statistics.fmean(shown):.1%}", *(gain.format("+.1%") for gain in gains))
        return rows

    windows = sorted({width, *WINDOWS})
    sides = {_named(window): partial(_around, engine, iterations, window, both) for window in windows}
    found = _answers(bench, "answers by window", asked, sides, table)
    curve = found[_named(width)]
    none, at_cap = curve[0], curve[iterations.index(cap)]
    bench.show(
        f"{len(asked)} other questions, of {none.whole.count(None)} no answer can be read after whole rationales. "
        f"cap {cap}: {at_cap.against_whole()[0]}. No rationale: {none.against_whole()[0]}"
    )
    by_cap = {
        "FastCoT": curve[:count],
        "without by-products": curve[count:],
        "cut after as many iterations of AR": found[_named(0)][count:],
    }
    bench.show(*(_curves(what, "iterations", iterations, by_cap) for what in ("accuracy", "agreement")))


def _named(window: int) -> str:
    return f"window {window}"


def _over_iterations(answers: Sequence[Answers]) -> list[float]:
    """The mean score of each question."""
    return [statistics.fmean(scores) for scores in zip(*(one.scores for one in answers), strict=True)]


def _masked(bench: Bench, engine: Engine, asked: Sequence[Rationale], seeds: int) -> None:
    """Figure 5: rationales masked from the end, and uniformly."""
    sides = {
        name: partial(masked, engine, shares=SHARES, seeds=drawn)
        for name, drawn in {"masked from the end": None, "masked uniformly": seeds}.items()
    }
    left = [f"{1 - share:.0%}" for share in SHARES]
    found = _answers(bench, "masks", asked, sides, partial(_curves, "accuracy", "the share left", left))
    bench.show(_curves("agreement", "the share left", left, found))


def _curves(what: str, after: str, at: Sequence[Any], sides: Curves) -> Table:
    """A table of accuracy, or of the answers that are those after whole rationales."""
    table = Table(f"{what} after {after}", *map(str, at), "mean")
    for name, answers in sides.items():
        curve = [getattr(one, what) for one in answers]
        table.add_row(name, *(f"{value:.0%}" for value in curve), f"{statistics.fmean(curve):.1%}")
    return table


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
            "answers": [one.read(answer) for one, answer in zip(batch, answers, strict=True)],
            "iterations": sum(completion.usage.forwards for completion in done),
            "saved": sum(completion.usage.accepted for completion in done),
            "spent": dict(metrics_of(engine, "answer").seconds),
        }

    def batch(together: int, turn: int) -> Sequence[Rationale]:
        """With its prompts computed: that decoder decodes next to nothing."""
        found = asked[turn * together : (turn + 1) * together]
        none.generate([one.request for one in found])
        return found

    def table(results: Measurements) -> Table:
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


_TIMES = [
    SECONDS,
    Metric("in all", lambda took: took["seconds"], lambda values: f"{sum(values):.1f}"),
    Metric("accuracy", lambda took: took["right"], percent),
    Metric("answers of CoT", lambda took: took["same"], percent),
    Metric("iterations", lambda took: took["iterations"], lambda values: f"{sum(values):.0f}"),
    Metric("saved", lambda took: took["saved"], lambda values: f"{sum(values):.0f}"),
    *SPENT,
]
