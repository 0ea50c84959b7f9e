"""Harness: what all benchmarks share. Sides take turns at the same work in rounds; medians, ratios and spreads of what
they took are shown as tables; numbers are written as they come, and a run that was stopped goes on from its file.

A cell is one side at one column (a number of branches, say) in one round. What it took is a mapping of names to
numbers, "seconds" of wall time among them.
"""

from __future__ import annotations

import json
import math
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from tot.bench.options import BenchOptions
from tot.decoders.files import write_json
from tot.evaluation.estimate import spread

FORMAT = 3
"""Of the files that are written."""
NOT_AT_ALL = 3.0
"""A cell predicted to take longer than the patience is done in the first round only; one predicted to take so many
times as long is not done."""
WARM_UP = 0.25
"""A cell is warmed up where that is predicted to take no longer than this share of the patience."""
_WIDE = 400

Measured = dict[str, Any]
Asking = Callable[[Any, int], Any]
"""(column, round) -> what every side is asked."""


@dataclass(frozen=True)
class Side:
    """Something that is measured. `run` does what is asked and tells what it took, "seconds" among it."""

    name: str
    run: Callable[[Any], Measured]
    about: str = ""
    most: int | None = None
    """The largest column that it is asked at; None for no limit."""


@dataclass(frozen=True)
class Metric:
    """What a table shows of each side: `of` gives a cell's number, or None where it has none; `show` makes a text of
    all that a side has."""

    heading: str
    of: Callable[[Measured], float | None]
    show: Callable[[Sequence[float]], str] = spread
    less: bool = False
    """Less is better: seconds, where a rate is better the larger it is."""

    def ratio(self, ours: Measured, theirs: Measured) -> float:
        """How many times as good ours is."""
        a, b = self.of(ours) or math.nan, self.of(theirs) or math.nan
        return b / a if self.less else a / b


def percent(values: Sequence[float]) -> str:
    """A mean in percent."""
    return f"{statistics.fmean(values):.0%}"


def times(ratios: Sequence[float]) -> str:
    """The median of ratios with the range seen: "2.05x (1.98 to 2.11)"; empty for none."""
    known = [ratio for ratio in ratios if not math.isnan(ratio)]
    return spread(known, ".2f").replace(" ", "x ", 1) + "x" * (len(known) == 1) if known else ""


def plain(form: str) -> Callable[[Sequence[float]], str]:
    """Shows a median alone."""
    return lambda values: f"{statistics.median(values):{form}}"


RATE = Metric("new tokens/s", lambda took: took["tokens"] / took["seconds"])
SECONDS = Metric("seconds", lambda took: took["seconds"], less=True)


@dataclass
class Measurements:
    """What sides took at one kind of work."""

    columns: Sequence[Any]
    rounds: int
    cells: list[Measured] = field(default_factory=list)
    """What each took, with "side", "column" and "round"."""
    skipped: list[Measured] = field(default_factory=list)
    """Cells not done, with the seconds that each was predicted to take."""
    failed: dict[str, str] = field(default_factory=dict)
    """Sides that could not go on, and why."""

    def of(self, side: str, column: Any = None) -> dict[int, Measured]:
        """What a side took, by round; by default at the only column."""
        column = self.columns[0] if column is None else column
        return {cell["round"]: cell for cell in self.cells if (cell["side"], cell["column"]) == (side, column)}

    def values(self, metric: Metric, side: str, column: Any = None) -> list[float]:
        """A metric's numbers, by round, where there are some."""
        found = (metric.of(took) for _, took in sorted(self.of(side, column).items()))
        return [value for value in found if value is not None]

    def ratios(self, metric: Metric, ours: str, theirs: str, column: Any = None) -> list[float]:
        """How many times as good ours was, in each round that both did."""
        mine, other = self.of(ours, column), self.of(theirs, column)
        return [metric.ratio(mine[turn], other[turn]) for turn in sorted(mine.keys() & other.keys())]

    @property
    def sides(self) -> list[str]:
        """Those that were asked."""
        done = [cell["side"] for cell in (*self.cells, *self.skipped)]
        return list(dict.fromkeys([*done, *self.failed]))


def by_metric(results: Measurements, metrics: Sequence[Metric], against: Sequence[str] = (), title: str = "") -> Table:
    """A row a side: its metrics, and ratios of the first one to the sides in `against`, medians of those by round."""
    metrics = [metric for metric in metrics if any(results.values(metric, side) for side in results.sides)]
    first, *rest = metrics or [SECONDS]
    compared = [f"against {name}" for name in against]
    table = Table("", first.heading, *compared, *(metric.heading for metric in rest), title=title)
    for side in results.sides:
        ratios = [times(results.ratios(first, side, base)) for base in against]
        shown = [metric.show(seen) if (seen := results.values(metric, side)) else "" for metric in (first, *rest)]
        table.add_row(side, shown[0], *ratios, *shown[1:])
    return table


def by_column(
    results: Measurements,
    metric: Metric,
    title: str,
    *,
    head: str = "",
    ratios: Sequence[tuple[str, str]] = (),
    others: Sequence[Metric] = (),
) -> Table:
    """A row a side and a column a column: one metric, then ratios of pairs of sides, then other metrics' rows."""
    table = Table("", *(f"{head}{column}" for column in results.columns), title=title)
    for side in results.sides:
        table.add_row(side, *(_cell(results, metric, side, column) for column in results.columns))
    for ours, theirs in ratios:
        shown = [times(results.ratios(metric, ours, theirs, column)) for column in results.columns]
        if any(shown):
            table.add_row(f"{ours} / {theirs}", *shown)
    for other in others:
        for side in results.sides:
            values = [results.values(other, side, column) for column in results.columns]
            if any(values):
                table.add_row(f"{side}: {other.heading}", *(other.show(some) if some else "" for some in values))
    return table


def _cell(results: Measurements, metric: Metric, side: str, column: Any) -> str:
    """Medians with what was seen, how often if not in every round, or why there is nothing."""
    if values := results.values(metric, side, column):
        return metric.show(values) + (f", {len(values)} of {results.rounds}" if len(values) < results.rounds else "")
    if side in results.failed:
        return "failed"
    left = [cell["predicted"] for cell in results.skipped if (cell["side"], cell["column"]) == (side, column)]
    return f"(over {left[0]:.0f} s)" if left else ""


class Bench:
    """One run of a benchmark: the screen, and the file with all numbers.

    A file of the same options and machine that was not finished is gone on with. Use it as a context: its end finishes
    the file.
    """

    def __init__(self, options: BenchOptions, console: Console, machine: str) -> None:
        self.console = console
        self.out = options.out
        self._markdown = options.markdown
        about = {"format": FORMAT, "machine": machine, "asked": options.asked}
        self.numbers: dict[str, Any] = {**about, "finished": False}
        console.print(machine)
        if self.out is not None and self.out.exists():
            try:
                before = dict(json.loads(self.out.read_text()))
            except (TypeError, ValueError):  # no file of ours
                before = {}
            if before.get("finished") is False and about.items() <= before.items():
                self.numbers = before
                self.say(f"going on with {self.out}, which was stopped; delete it to begin anew")

    def __enter__(self) -> Bench:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.keep(finished=True)
        if self.out is not None and self.out.exists():
            self.console.print(f"numbers: {self.out}")

    def say(self, text: str) -> None:
        """Tell how it goes."""
        self.console.print(text, style="dim")

    def keep(self, **numbers: Any) -> None:
        """Put numbers into the file."""
        self.numbers |= numbers
        if self.out is not None:
            write_json(self.out, self.numbers)

    def show(self, *shown: Table | str) -> None:
        """Print tables, as Markdown where that is asked for (a row a line), and lines."""
        for one in shown:
            if not isinstance(one, Table) or not self._markdown:
                self.console.print(one)
                continue
            self.console.print(f"\n{one.title}:\n" if one.title else "", soft_wrap=True)
            one.title, one.box = None, box.MARKDOWN
            width, self.console.width = self.console.width, _WIDE
            self.console.print(one)
            self.console.width = width

    def compare(
        self,
        title: str,
        sides: Sequence[Side],
        asking: Asking,
        *,
        rounds: int,
        columns: Sequence[Any] = ("",),
        warm_up: Callable[[Any], Any] | None = None,
        size: Callable[[Any], float] = lambda asked: 1.0,
        patience: float = math.inf,
        failing: bool = False,
        metrics: Sequence[Metric] = (SECONDS,),
        against: Sequence[str] = (),
        table: Callable[[Measurements], Table] | None = None,
    ) -> Measurements:
        """All columns in each round, and at each all sides, another one first from round to round.

        `warm_up` gives what is asked of every cell beforehand, uncounted. `size` is how much work something asked is,
        from which times are predicted; what takes longer than `patience` (seconds) is left out, as `NOT_AT_ALL` says.
        `failing` sides are left out from then on and told, where else their errors are raised. What is known is shown
        also where Ctrl-C ends it: as `table`, or with `metrics` and the first one's ratios to the sides `against`.
        """
        kept = self.numbers.setdefault(title, {"cells": [], "skipped": [], "failed": {}})
        results = Measurements(columns, rounds, **kept)
        work = _Comparison(self, title, results, sides, size, patience, failing)
        try:
            if warm_up is not None and any(work.open(column, turn) for turn in range(rounds) for column in columns):
                self.say(f"{title}: warm-up …")
                for column in columns:
                    work.warm_up(column, warm_up(column))
            for turn in range(rounds):
                for column in columns:
                    if work.open(column, turn):
                        work.round(column, turn, asking(column, turn))
        finally:
            self.keep()
            if results.sides:
                self.show(table(results) if table is not None else by_metric(results, metrics, against, title))
            for name, why in results.failed.items():
                self.show(f"{name} failed: {why}")
        return results


@dataclass
class _Comparison:
    """One comparison under way."""

    bench: Bench
    title: str
    results: Measurements
    sides: Sequence[Side]
    size: Callable[[Any], float]
    patience: float
    failing: bool
    last: dict[str, dict[Any, tuple[float, float]]] = field(default_factory=dict)
    """Seconds and size of each cell when it was last done."""

    def __post_init__(self) -> None:
        for cell in self.results.cells:  # of a run that is resumed
            if "size" in cell:
                self.last.setdefault(cell["side"], {})[cell["column"]] = cell["seconds"], cell["size"]

    def open(self, column: Any, turn: int) -> list[Side]:
        """The sides that a cell is still to be asked of, in the order of a round."""
        asked = [
            side
            for side in self.sides
            if side.name not in self.results.failed and (side.most is None or column <= side.most)
        ]
        step = max(1, len(asked) // max(1, self.results.rounds))
        first = turn * step % len(asked) if asked else 0
        skipped = {cell["side"] for cell in self.results.skipped if cell["column"] == column}
        return [
            side
            for side in (*asked[first:], *asked[:first])
            if side.name not in skipped and turn not in self.results.of(side.name, column)
        ]

    def warm_up(self, column: Any, asked: Any) -> None:
        for side in self.open(column, 0):
            if self.predicted(side, column, asked) <= WARM_UP * self.patience:
                self.run(side, column, asked)

    def round(self, column: Any, turn: int, asked: Any) -> None:
        """A column's cells in one round."""
        for side in self.open(column, turn):
            predicted = self.predicted(side, column, asked)
            cell = {"side": side.name, "column": column, "round": turn}
            what = f"{self.title}, round {turn + 1}: {side.name}{f', {column}' if column != '' else ''}"
            if not turn and predicted > NOT_AT_ALL * self.patience:
                self.results.skipped.append({**cell, "predicted": predicted})
                self.bench.say(f"{what}: not done, it would take {predicted:.0f} s")
            elif (not turn or predicted <= self.patience) and (took := self.run(side, column, asked)):
                self.results.cells.append({**cell, "size": self.size(asked), **took})
                self.bench.keep()
                self.bench.say(f"{what}: {took['seconds']:.2f} s{self.left()}")

    def predicted(self, side: Side, column: Any, asked: Any) -> float:
        """Seconds, in proportion to size, from the cell itself or the last column that was done; 0 where none was."""
        last = self.last.get(side.name)
        if not last:
            return 0.0
        seconds, size = last.get(column) or list(last.values())[-1]
        return seconds * self.size(asked) / size

    def left(self) -> str:
        """How long all that is open may take, in words: by what each side took at each column, else by the mean."""
        took: defaultdict[tuple[str, Any], list[float]] = defaultdict(list)
        for cell in self.results.cells:
            took[cell["side"], cell["column"]].append(cell["seconds"])
        mean = statistics.fmean(map(statistics.median, took.values()))
        seconds = 0.0
        for column in self.results.columns:
            for side in self.open(column, self.results.rounds - 1):
                known = took[side.name, column]
                each = statistics.median(known) if known else mean
                seconds += each * (self.results.rounds - len(known)) * (each <= self.patience)
        if seconds < 60:
            return ""
        return f", about {seconds / 60:.0f} min left" if seconds < 7200 else f", about {seconds / 3600:.1f} h left"

    def run(self, side: Side, column: Any, asked: Any) -> Measured | None:
        """What it took, or None where the side failed; it is not asked again."""
        try:
            took = side.run(asked)
        except Exception as error:
            if not self.failing:
                raise
            self.results.failed[side.name] = str(error) or type(error).__name__
            self.bench.say(f"{side.name} failed: {self.results.failed[side.name]}")
            return None
        self.last.setdefault(side.name, {})[column] = took["seconds"], self.size(asked)
        return took


def timed(work: Callable[[], Any]) -> tuple[float, Any]:
    """Seconds of wall time, and what the work gave."""
    began = time.perf_counter()
    done = work()
    return time.perf_counter() - began, done
