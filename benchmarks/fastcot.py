"""The benchmark `fastcot`: speed and accuracy of FastCoT, in the layout of the paper's tables.

A random half of the questions calibrates the cap, by our stop rule and by the paper's (section 4.4). The other half
measures answers by iteration (figure 6) and window (figure 8). Then the time of decoding, without the prefill of the
question: rationales one at a time and packed (table 1), with the parts of it that this engine has (table 2: it pads no
batch and strips no cache).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from statistics import fmean
from typing import Any, Literal

from pydantic import Field
from rich.console import Console
from rich.table import Table

from benchmarks.caps import AGREEMENT, LOSS, Answers, against_whole, by_iteration, decode_whole, described_cap
from benchmarks.engines import about, timed_parts
from benchmarks.harness import SECONDS, Bench, BenchOptions, Cells, Measured, Metric, by_metric, percent, timed
from benchmarks.rationales import Question, sampled_rationales
from tot.decoders.decoder import LocalDecoder, load_decoder
from tot.decoders.engine.engine import Engine
from tot.decoders.methods.fastcot import FastCoTOptions
from tot.decoders.models.engine_options import Quantize
from tot.evaluation.estimate import paired

WINDOWS = (0, 5, 10, 15, 20, 25)
TOGETHER = 8
"""Rationales per packed batch."""
_BATCH = 16
"""Rationales that are decoded together."""
RULES = {"FastCoT": AGREEMENT, "FastCoT, the paper's rule": None}
"""The stop rules: the minimum share of unchanged answers; the paper's rule has none."""
Answering = Callable[[Sequence[Question]], list[Answers]]
Curves = dict[str, list[Answers]]
"""By side, the answers at each point of its curve."""


class Options(BenchOptions):
    """Compare FastCoT with whole rationales: time, accuracy and unchanged answers, by iteration and at the cap."""

    parts: tuple[Literal["answers", "times"], ...] = Field(
        ("answers", "times"), description="Comma-separated: answers (after part of a rationale), times."
    )
    data: str = Field(description="Questions with answers, as for tot eval.")
    task: str = Field("multiple_choice", description="The task of these questions.")
    prompts: Literal["chat", "papers"] = Field("papers", description="As for tot eval.")
    limit: int = Field(100, ge=4, description="Number of questions; half calibrate the cap, half test it.")
    timed: int = Field(16, ge=1, description="Number of test questions to time.")
    max_tokens: int = Field(128, ge=2, description="Maximum tokens of a rationale.")
    dtype: Literal["auto", "bf16", "fp32"] = Field("auto", description="Number format.")
    quantize: Quantize = Field("auto", description="As for tot eval.")


def run(asked: Options, console: Console) -> None:
    """Run the benchmark and print the tables."""
    most = asked.max_tokens
    rationales = sampled_rationales(asked.task, asked.data, asked.limit, most, asked.prompts == "chat")
    calibrating, testing = rationales[: len(rationales) // 2], rationales[len(rationales) // 2 :]
    with load_decoder("ar", asked.model, prefix_cache=False, dtype=asked.dtype, quantize=asked.quantize) as plain:
        engine = plain.engine
        bench = Bench(asked, console, f"{asked.model}; {about(engine)}")
        width = bench.numbers.setdefault("window", FastCoTOptions().window)
        bench.show(f"{asked.task}: {len(rationales)} questions, rationales of up to {most} tokens; window {width}")
        iterations = [*range(0, most + 1, max(1, most // 16))]
        around = partial(_around, engine, iterations)
        table = partial(_curves, "accuracy", iterations)
        curve = _answers(bench, "calibration", calibrating, {"FastCoT": partial(around, width, (True,))}, table)
        caps = {}
        for rule, agreement in RULES.items():
            found, note = described_cap(iterations, curve["FastCoT"], LOSS, agreement)
            bench.show(f"{rule}, calibrated on {len(calibrating)} questions: {note}")
            caps[rule] = iterations[len(iterations) // 2] if found is None else found
        bench.keep(caps=caps)
        if "answers" in asked.parts:
            _by_window(bench, around, testing, iterations, width, caps)
        if "times" in asked.parts:
            _times(bench, engine, testing[: asked.timed], width, caps)


def _around(
    engine: Engine, iterations: Sequence[int], window: int, glimpses: Sequence[bool], batch: Sequence[Question]
) -> list[Answers]:
    """Return the answers by iteration, for each value in `glimpses` (whether approximate tokens are used)."""
    decoded = decode_whole(engine, batch, window)
    return [one for glimpse in glimpses for one in by_iteration(engine, batch, decoded, iterations, glimpse)]


def _answers(
    bench: Bench,
    title: str,
    rationales: Sequence[Question],
    sides: Mapping[str, Answering],
    table: Callable[[Curves], Table],
) -> Curves:
    """Run all sides in batches; finished batches are saved."""
    parts = [rationales[start : start + _BATCH] for start in range(0, len(rationales), _BATCH)]

    def answered(side: Answering, batch: Sequence[Question]) -> Measured:
        seconds, answers = timed(lambda: side(batch))
        return {"seconds": seconds, "answers": [asdict(one) for one in answers]}

    def curves(cells: Cells) -> Curves:
        found: Curves = {}
        for side in cells.sides:
            points = zip(*(cell["answers"] for _, cell in sorted(cells.of(side).items())), strict=True)
            found[side] = [Answers.joined([Answers(**batch) for batch in point]) for point in points]
        return found

    cells = bench.compare(
        title,
        {name: partial(answered, side) for name, side in sides.items()},
        parts,
        lambda cells: table(curves(cells)),
    )
    return curves(cells)


def _curves(metric: str, iterations: Sequence[int], sides: Curves) -> Table:
    """Build a table of accuracy, or of agreement with the answers after whole rationales."""
    table = Table(f"{metric} after iterations", *map(str, iterations), "mean")
    for name, answers in sides.items():
        curve = [getattr(one, metric) for one in answers]
        table.add_row(name, *(f"{value:.0%}" for value in curve), f"{fmean(curve):.1%}")
    return table


def _by_window(
    bench: Bench,
    around: Callable[..., list[Answers]],
    rationales: Sequence[Question],
    iterations: Sequence[int],
    width: int,
    caps: Mapping[str, int],
) -> None:
    """Figures 8 and 6: accuracy by window and by cap.

    Figure 8: the mean accuracy over caps for each window, its difference to the same without approximate tokens, and
    its difference to a rationale cut after the same number of iterations. Figure 6: each cap, for one window.
    """
    count = len(iterations)
    names = {window: f"window {window}" for window in sorted({width, *WINDOWS})}

    def over_iterations(answers: Sequence[Answers]) -> list[float]:
        """Return the mean score of each question over all iterations."""
        return [fmean(scores) for scores in zip(*(one.scores for one in answers), strict=True)]

    def table(curves: Curves) -> Table:
        heads = ("window", "accuracy", "minus without by-products", "minus cut")
        rows = Table(*heads, title="by window, over all iterations")
        cut = over_iterations(curves[names[0]][count:])
        for name, curve in curves.items():
            glimpse, without = over_iterations(curve[:count]), over_iterations(curve[count:])
            # Pairs end with the shorter curve.
            gains = [paired([a - b for a, b in zip(glimpse, other, strict=False)]) for other in (without, cut)]
            rows.add_row(name, f"{fmean(glimpse):.1%}", *(gain.format("+.1%") for gain in gains))
        return rows

    sides = {name: partial(around, window, (True, False)) for window, name in names.items()}
    curves = _answers(bench, "answers by window", rationales, sides, table)
    curve = curves[names[width]]
    bench.show(
        f"{len(rationales)} test questions; {curve[0].whole.count(None)} have no valid answer after whole rationales",
        f"no rationale: {against_whole(curve[0])[0]}",
        *(f"{rule}, cap {cap}: {against_whole(curve[iterations.index(cap)])[0]}" for rule, cap in caps.items()),
    )
    by_cap = {
        "FastCoT": curve[:count],
        "without by-products": curve[count:],
        "cut after the same number of AR iterations": curves[names[0]][count:],
    }
    bench.show(*(_curves(metric, iterations, by_cap) for metric in ("accuracy", "agreement")))


def _times(bench: Bench, engine: Engine, rationales: Sequence[Question], window: int, caps: Mapping[str, int]) -> None:
    """Tables 1 and 2: the same questions one at a time and packed."""
    fastcot: Callable[..., Any] = partial(load_decoder, "fastcot", engine=engine)
    ar, no_rationale, cap = load_decoder("ar", engine=engine), fastcot(cap=0), caps["FastCoT"]
    packed = {"CoT": ar, **{rule: fastcot(window=window, cap=limit) for rule, limit in caps.items()}}
    alone = {
        **packed,
        "FastCoT, no cap": fastcot(window=window),
        "cut": fastcot(window=0, cap=cap, glimpse=False),
        **{f"window {width}": fastcot(window=width, cap=cap) for width in WINDOWS},
        "no rationale": no_rationale,
    }

    def answered(decoder: LocalDecoder, batch: Sequence[Question]) -> Measured:
        with timed_parts(engine) as timeline:
            seconds, completions = timed(lambda: decoder.generate([one.request for one in batch]))
        answers = [one.answer(completion) for one, completion in zip(batch, completions, strict=True)]
        return {
            "seconds": seconds,
            "parts": timeline.seconds(),
            "right": fmean(one.score(answer) for one, answer in zip(batch, answers, strict=True)),
            "answers": [one.read(answer) for one, answer in zip(batch, answers, strict=True)],
            "iterations": sum(completion.usage.forwards for completion in completions),
        }

    def batch(size: int, turn: int) -> Sequence[Question]:
        """Prefill a batch's prompts with a decoder of cap 0, which decodes almost nothing."""
        chosen = rationales[turn * size : (turn + 1) * size]
        no_rationale.generate([one.request for one in chosen])
        return chosen

    def table(cells: Cells) -> Table:
        """Add the share of answers equal to CoT's answers."""
        cot = cells.of("CoT")

        def same(cell: Measured) -> float:
            whole = cot.get(cell["round"], cell)["answers"]
            return fmean(a == b for a, b in zip(cell["answers"], whole, strict=True))

        used = ", ".join(f"{rule}: cap {cap}" for rule, cap in caps.items())
        metrics = [*_TIMES, Metric("answers of CoT", same, percent), _ITERATIONS]
        return by_metric(cells, metrics, ["CoT"], f"{len(rationales)} questions, {used}; seconds of decoding")

    for size, decoders in ((1, alone), (TOGETHER, packed)):
        bench.compare(
            f"rationales, {size} at a time",
            {name: partial(answered, decoder) for name, decoder in decoders.items()},
            lambda _, turn, size=size: batch(size, turn),  # type: ignore[misc]
            table,
            rounds=-(-len(rationales) // size),
            warm_up=True,
        )


def _summed(heading: str, of: Callable[[Measured], float]) -> Metric:
    return Metric(heading, of, lambda values: f"{sum(values):.1f}")


_TIMES = [
    SECONDS,
    _summed("in all", lambda cell: cell["seconds"]),
    _summed("forward passes", lambda cell: cell["parts"]["verify"]),
    _summed("sampling", lambda cell: cell["parts"]["sampling"]),
    _summed("other", lambda cell: cell["seconds"] - cell["parts"]["verify"] - cell["parts"]["sampling"]),
    Metric("accuracy", lambda cell: cell["right"], percent),
]
_ITERATIONS = Metric("iterations", lambda cell: cell["iterations"], lambda values: f"{sum(values):.0f}")
