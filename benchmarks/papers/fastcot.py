"""The benchmark `fastcot`: speed and accuracy of FastCoT, in the layout of the paper's tables.

A random half of the questions calibrates the cap, by our stop rule and by the paper's (section 4.4). The other half
measures answers by iteration (figure 6) and window (figure 8), and after partly masked rationales (figure 5). Then the
time of decoding, without the prefill of the question: rationales one at a time and packed (table 1), with the parts of
it that this engine has (table 2: it pads no batch and strips no cache).
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.engines import about
from benchmarks.harness import SECONDS, Bench, Measured, Measurements, Metric, Side, by_metric, percent, timed
from benchmarks.options import FastCoTBench
from tot.decoders.decoder import LocalDecoder, load_decoder
from tot.decoders.engine.engine import Engine
from tot.decoders.methods.options import FastCoTOptions
from tot.decoders.timeline import Timeline
from tot.evaluation.estimate import paired
from tot.training.fastcot import Answers, Rationale, batches, by_iteration, decode_whole, find_cap, masked, questions

WINDOWS = (0, 5, 10, 15, 20, 25)
SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)
"""Masked shares of a rationale."""
TOGETHER = 8
"""Rationales per packed batch."""
LOSS = 0.03
"""Accuracy that a cap may lose."""
RULES = {"FastCoT": 0.9, "FastCoT, the paper's rule": None}
"""The stop rules: the minimum share of unchanged answers; the paper's rule has none."""
Answering = Callable[[Sequence[Rationale]], list[Answers]]
Curves = dict[str, list[Answers]]
"""By side, the answers at each point of its curve."""


def run(options: FastCoTBench, console: Console) -> None:
    """Run the benchmark and print the tables."""
    rationales = questions(options.task, options.data, options.limit, options.max_tokens, 0, options.prompts == "chat")
    calibrating, testing = rationales[: len(rationales) // 2], rationales[len(rationales) // 2 :]
    most = options.max_tokens
    with load_decoder("ar", options.model, **options.computed) as plain:
        engine = plain.engine
        machine = f"{options.model}; {about(engine)}"
        bench = Bench(options, console, machine)
        width = bench.numbers.setdefault("window", FastCoTOptions().window)
        bench.show(f"{options.task}: {len(rationales)} questions, rationales of up to {most} tokens; window {width}")
        iterations = [*range(0, most + 1, max(1, most // 16))]
        sides = {"FastCoT": partial(_around, engine, iterations, width, (True,))}
        table = partial(_curves, "accuracy", "iterations", iterations)
        curve = _answers(bench, "calibration", calibrating, sides, table)["FastCoT"]
        caps = {}
        for rule, agreement in RULES.items():
            found, note = find_cap(iterations, curve, LOSS, agreement)
            bench.show(f"{rule}, calibrated on {len(calibrating)} questions: {note}")
            caps[rule] = iterations[len(iterations) // 2] if found is None else found
        bench.keep(caps=caps)
        if "answers" in options.parts:
            _by_window(bench, engine, testing, iterations, width, caps)
        if "masks" in options.parts:
            _masked(bench, engine, testing, options.seeds)
        if "times" in options.parts:
            _times(bench, engine, testing[: options.timed], width, caps)


def _answers(
    bench: Bench,
    title: str,
    rationales: Sequence[Rationale],
    sides: Mapping[str, Answering],
    table: Callable[[Curves], Table],
) -> Curves:
    """Run all sides in batches; finished batches are saved."""
    parts = batches(rationales)

    def answered(side: Answering, batch: Sequence[Rationale]) -> Measured:
        seconds, answers = timed(lambda: side(batch))
        return {"seconds": seconds, "answers": [asdict(one) for one in answers]}

    def curves(results: Measurements) -> Curves:
        done = {
            side: [measured["answers"] for _, measured in sorted(results.of(side).items())] for side in results.sides
        }
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
    """Return the answers by iteration, for each value in `glimpses` (whether approximate tokens are used)."""
    decoded = decode_whole(engine, batch, window)
    return [one for glimpse in glimpses for one in by_iteration(engine, batch, decoded, iterations, glimpse)]


def _by_window(
    bench: Bench,
    engine: Engine,
    rationales: Sequence[Rationale],
    iterations: Sequence[int],
    width: int,
    caps: Mapping[str, int],
) -> None:
    """Figures 8 and 6: accuracy by window and by cap.

    Figure 8: the mean accuracy over caps for each window, its difference to the same without approximate tokens, and
    its difference to a rationale cut after the same number of iterations. Figure 6: each cap, for one window.
    """
    both, count = (True, False), len(iterations)

    def table(curves: Curves) -> Table:
        rows = Table(
            "window", "accuracy", "minus without by-products", "minus cut", title="by window, over all iterations"
        )
        cut = _over_iterations(curves[_named(0)][count:])
        for name, curve in curves.items():
            with_glimpse, without_glimpse = _over_iterations(curve[:count]), _over_iterations(curve[count:])
            # Pairs end with the shorter curve.
            pairs = (zip(with_glimpse, other, strict=False) for other in (without_glimpse, cut))
            gains = [paired([a - b for a, b in pair]) for pair in pairs]
            rows.add_row(name, f"{statistics.fmean(with_glimpse):.1%}", *(gain.format("+.1%") for gain in gains))
        return rows

    windows = sorted({width, *WINDOWS})
    sides = {_named(window): partial(_around, engine, iterations, window, both) for window in windows}
    curves = _answers(bench, "answers by window", rationales, sides, table)
    curve = curves[_named(width)]
    bench.show(
        f"{len(rationales)} test questions; {curve[0].whole.count(None)} have no valid answer after whole rationales",
        f"no rationale: {curve[0].against_whole()[0]}",
        *(f"{rule}, cap {cap}: {curve[iterations.index(cap)].against_whole()[0]}" for rule, cap in caps.items()),
    )
    by_cap = {
        "FastCoT": curve[:count],
        "without by-products": curve[count:],
        "cut after the same number of AR iterations": curves[_named(0)][count:],
    }
    bench.show(*(_curves(metric, "iterations", iterations, by_cap) for metric in ("accuracy", "agreement")))


def _named(window: int) -> str:
    return f"window {window}"


def _over_iterations(answers: Sequence[Answers]) -> list[float]:
    """Return the mean score of each question over all iterations."""
    return [statistics.fmean(scores) for scores in zip(*(one.scores for one in answers), strict=True)]


def _masked(bench: Bench, engine: Engine, rationales: Sequence[Rationale], seeds: int) -> None:
    """Figure 5: rationales masked from the end and uniformly."""
    sides = {
        name: partial(masked, engine, shares=SHARES, seeds=mask_seeds)
        for name, mask_seeds in {"masked from the end": None, "masked uniformly": seeds}.items()
    }
    remaining = [f"{1 - share:.0%}" for share in SHARES]
    curves = _answers(bench, "masks", rationales, sides, partial(_curves, "accuracy", "the share left", remaining))
    bench.show(_curves("agreement", "the share left", remaining, curves))


def _curves(metric: str, axis: str, points: Sequence[Any], sides: Curves) -> Table:
    """Build a table of accuracy, or of agreement with the answers after whole rationales."""
    table = Table(f"{metric} after {axis}", *map(str, points), "mean")
    for name, answers in sides.items():
        curve = [getattr(one, metric) for one in answers]
        table.add_row(name, *(f"{value:.0%}" for value in curve), f"{statistics.fmean(curve):.1%}")
    return table


def _times(bench: Bench, engine: Engine, rationales: Sequence[Rationale], window: int, caps: Mapping[str, int]) -> None:
    """Tables 1 and 2: the same questions one at a time and packed."""
    cot, no_rationale = load_decoder("ar", engine=engine), load_decoder("fastcot", engine=engine, cap=0)
    ruled = {rule: load_decoder("fastcot", engine=engine, window=window, cap=cap) for rule, cap in caps.items()}
    cap = caps["FastCoT"]
    alone = {
        "CoT": cot,
        **ruled,
        "FastCoT, no cap": load_decoder("fastcot", engine=engine, window=window),
        "cut": load_decoder("fastcot", engine=engine, window=0, cap=cap, glimpse=False),
        **{f"window {c}": load_decoder("fastcot", engine=engine, window=c, cap=cap) for c in WINDOWS},
        "no rationale": no_rationale,
    }

    def answered(decoder: LocalDecoder, batch: Sequence[Rationale]) -> Measured:
        engine.timeline = timeline = Timeline()
        seconds, completions = timed(lambda: decoder.generate([one.request for one in batch]))
        engine.timeline = None
        answers = [one.answer(completion) for one, completion in zip(batch, completions, strict=True)]
        return {
            "seconds": seconds,
            "parts": timeline.seconds(),
            "right": statistics.fmean(one.right(answer) for one, answer in zip(batch, answers, strict=True)),
            "answers": [one.read(answer) for one, answer in zip(batch, answers, strict=True)],
            "iterations": sum(completion.usage.forwards for completion in completions),
        }

    def batch(batch_size: int, turn: int) -> Sequence[Rationale]:
        """Prefill a batch's prompts with a decoder of cap 0, which decodes almost nothing."""
        rationales_in_batch = rationales[turn * batch_size : (turn + 1) * batch_size]
        no_rationale.generate([one.request for one in rationales_in_batch])
        return rationales_in_batch

    def table(results: Measurements) -> Table:
        """Add the share of answers equal to CoT's answers."""
        for cell in results.cells:
            base = results.of("CoT").get(cell["round"], cell)
            cell["same"] = statistics.fmean(a == b for a, b in zip(cell["answers"], base["answers"], strict=True))
        used = ", ".join(f"{rule}: cap {cap}" for rule, cap in caps.items())
        return by_metric(results, _TIMES, ["CoT"], f"{len(rationales)} questions, {used}; seconds of decoding")

    for batch_size, decoders in {1: alone, TOGETHER: {"CoT": cot, **ruled}}.items():
        bench.compare(
            f"rationales, {batch_size} at a time",
            [Side(name, partial(answered, decoder)) for name, decoder in decoders.items()],
            lambda _, turn, batch_size=batch_size: batch(batch_size, turn),  # type: ignore[misc]
            rounds=-(-len(rationales) // batch_size),
            warm_up=lambda _, batch_size=batch_size: batch(batch_size, 0),  # type: ignore[misc]
            table=table,
        )


def _summed(heading: str, of: Callable[[Measured], float]) -> Metric:
    return Metric(heading, of, lambda values: f"{sum(values):.1f}")


_TIMES = [
    SECONDS,
    _summed("in all", lambda measured: measured["seconds"]),
    _summed("forward passes", lambda measured: measured["parts"]["verify"]),
    _summed("sampling", lambda measured: measured["parts"]["sampling"]),
    _summed(
        "other", lambda measured: measured["seconds"] - measured["parts"]["verify"] - measured["parts"]["sampling"]
    ),
    Metric("accuracy", lambda measured: measured["right"], percent),
    Metric("answers of CoT", lambda measured: measured["same"], percent),
    Metric("iterations", lambda measured: measured["iterations"], lambda values: f"{sum(values):.0f}"),
]
