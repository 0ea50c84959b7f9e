"""The harness of all benchmarks.

Sides take turns at the same work in rounds. Tables show medians, ratios and ranges. The numbers are written after each
cell, and a stopped run resumes from its file.

A cell is one side at one column (a number of branches, for example) in one round. Its measurement is a mapping of names
to numbers, including "seconds" of wall time.
"""

from __future__ import annotations

import json
import math
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from benchmarks.options import BenchOptions
from tot.decoders.errors import OptionError
from tot.decoders.files import write_json
from tot.evaluation.estimate import spread

FORMAT = 6
"""Version of the results file format."""
NOT_AT_ALL = 3.0
"""A cell predicted to take longer than the patience runs in the first round only. Above this multiple of the patience,
it does not run at all."""
WARM_UP = 0.25
"""A cell is warmed up only if that is predicted to take at most this fraction of the patience."""
_WIDE = 400

Measured = dict[str, Any]
Asking = Callable[[Any, int], Any]
"""(column, round) -> the work that every side gets."""


@dataclass(frozen=True)
class Side:
    """One side of a comparison. `run` does the work and returns its measurement, including "seconds"."""

    name: str
    run: Callable[[Any], Measured]
    about: str = ""
    most: int | None = None
    """The largest column that it runs at; None for no limit."""


@dataclass(frozen=True)
class Metric:
    """A table column: `of` returns a cell's number, or None if it is missing; `show` formats all numbers of a side."""

    heading: str
    of: Callable[[Measured], float | None]
    show: Callable[[Sequence[float]], str] = spread
    less: bool = False
    """Whether a smaller number is better, as for seconds."""

    def ratio(self, ours: Measured, theirs: Measured) -> float:
        """Return by which factor ours is better than theirs."""
        a, b = self.of(ours) or math.nan, self.of(theirs) or math.nan
        return b / a if self.less else a / b


def percent(values: Sequence[float]) -> str:
    """Format a mean in percent."""
    return f"{statistics.fmean(values):.0%}"


def times(ratios: Sequence[float]) -> str:
    """Format the median and range of ratios, as "2.05x (1.98 to 2.11)"; empty without ratios."""
    known = [ratio for ratio in ratios if not math.isnan(ratio)]
    return spread(known, ".2f").replace(" ", "x ", 1) + "x" * (len(known) == 1) if known else ""


def plain(form: str) -> Callable[[Sequence[float]], str]:
    """Return a function that formats the median only."""
    return lambda values: f"{statistics.median(values):{form}}"


RATE = Metric("new tokens/s", lambda measured: measured["tokens"] / measured["seconds"])
SECONDS = Metric("seconds", lambda measured: measured["seconds"], less=True)


@dataclass
class Measurements:
    """The measurements of all sides in one comparison."""

    columns: Sequence[Any]
    rounds: int
    cells: list[Measured] = field(default_factory=list)
    """Measurements, with "side", "column" and "round"."""
    skipped: list[Measured] = field(default_factory=list)
    """Cells that were skipped, with the predicted seconds."""
    failed: dict[str, str] = field(default_factory=dict)
    """Error messages of the sides that failed."""

    def of(self, side: str, column: Any = None) -> dict[int, Measured]:
        """Return a side's measurements by round; by default at the first column. A file may have more rounds."""
        column = self.columns[0] if column is None else column
        cells = (cell for cell in self.cells if (cell["side"], cell["column"]) == (side, column))
        return {cell["round"]: cell for cell in cells if cell["round"] < self.rounds}

    def values(self, metric: Metric, side: str, column: Any = None) -> list[float]:
        """Return a metric's numbers in the order of rounds, without missing ones."""
        numbers = (metric.of(measured) for _, measured in sorted(self.of(side, column).items()))
        return [value for value in numbers if value is not None]

    def ratios(self, metric: Metric, ours: str, theirs: str, column: Any = None) -> list[float]:
        """Return the metric's ratios, one for each round that both sides completed."""
        mine, other = self.of(ours, column), self.of(theirs, column)
        return [metric.ratio(mine[turn], other[turn]) for turn in sorted(mine.keys() & other.keys())]

    @property
    def sides(self) -> list[str]:
        """Names of the sides with a measurement, a skipped cell or a failure."""
        sides = [cell["side"] for cell in (*self.cells, *self.skipped)]
        return list(dict.fromkeys([*sides, *self.failed]))


def by_metric(results: Measurements, metrics: Sequence[Metric], against: Sequence[str] = (), title: str = "") -> Table:
    """Build a table with one row per side: its metrics, and the first metric's ratios to the sides in `against`."""
    metrics = [metric for metric in metrics if any(results.values(metric, side) for side in results.sides)]
    first, *rest = metrics or [SECONDS]
    compared = [f"against {name}" for name in against]
    table = Table("", first.heading, *compared, *(metric.heading for metric in rest), title=title)
    for side in results.sides:
        ratios = [times(results.ratios(first, side, base)) for base in against]
        cells = [metric.show(seen) if (seen := results.values(metric, side)) else "" for metric in (first, *rest)]
        table.add_row(side, cells[0], *ratios, *cells[1:])
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
    """Build a table of one metric by side and column, then ratios of pairs of sides; the same of the other metrics."""
    table = Table("", *(f"{head}{column}" for column in results.columns), title=title)
    for one in (metric, *others):
        suffix = "" if one is metric else f": {one.heading}"
        for side in results.sides:
            if one is metric or any(results.values(one, side, column) for column in results.columns):
                table.add_row(side + suffix, *(_cell(results, one, side, column) for column in results.columns))
        for ours, theirs in ratios:
            cells = [times(results.ratios(one, ours, theirs, column)) for column in results.columns]
            if any(cells):
                table.add_row(f"{ours} / {theirs}{suffix}", *cells)
    return table


def _cell(results: Measurements, metric: Metric, side: str, column: Any) -> str:
    """Format one cell: the metric, with the number of rounds if some are missing, or why it is empty."""
    if values := results.values(metric, side, column):
        return metric.show(values) + (f", {len(values)} of {results.rounds}" if len(values) < results.rounds else "")
    if side in results.failed:
        return "failed"
    predictions = [cell["predicted"] for cell in results.skipped if (cell["side"], cell["column"]) == (side, column)]
    return f"(over {predictions[0]:.0f} s)" if predictions else ""


def _different(about: Measured, previous: Measured) -> str:
    """Name what differs between two runs: the options, or else the machine or the format of the file."""
    options = previous["asked"] if isinstance(previous["asked"], dict) else {}
    names = [name for name, value in about["asked"].items() if options.get(name) != value] or [
        name for name in about if about[name] != previous.get(name)
    ]
    return ", ".join(names)


class Bench:
    """One run of a benchmark: prints to the console and writes all numbers to a file.

    A file with the same options and machine is resumed. Any other file raises OptionError.
    """

    def __init__(self, options: BenchOptions, console: Console, machine: str) -> None:
        self.console = console
        self.out = options.out
        self._markdown = options.markdown
        about = {"format": FORMAT, "machine": machine, "asked": options.asked}
        self.numbers: dict[str, Any] = about
        console.print(machine)
        if self.out is not None and self.out.exists():
            try:
                previous = dict(json.loads(self.out.read_text()))
            except (TypeError, ValueError):  # not a results file
                previous = {}
            if about.items() <= previous.items():
                self.numbers = previous
                self.say(f"resuming {self.out}; delete it to start over")
            else:
                other = f"was measured with other {_different(about, previous)}" if "asked" in previous else ""
                raise OptionError(f"{self.out} {other or 'has no results'}: delete it, or give another --out")

    def say(self, text: str) -> None:
        """Print a line about progress."""
        self.console.print(text, style="dim")

    def keep(self, **numbers: Any) -> None:
        """Add numbers to the file."""
        self.numbers |= numbers
        if self.out is not None:
            write_json(self.out, self.numbers)

    def show(self, *shown: Table | str) -> None:
        """Print tables and lines; with the option `markdown`, tables are printed as Markdown."""
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
        size: Callable[[Any], float] = lambda work: 1.0,
        patience: float = math.inf,
        failing: bool = False,
        metrics: Sequence[Metric] = (SECONDS,),
        against: Sequence[str] = (),
        table: Callable[[Measurements], Table] | None = None,
    ) -> Measurements:
        """Run every side at every column in each round; the first side changes from round to round.

        The table is printed also after Ctrl-C.

        Args:
            title: Heading of the table and key of the results in the file.
            asking: Returns the work of a column and a round.
            warm_up: Returns the work of a column that every side does first, unmeasured.
            size: Returns the amount of work, from which times are predicted.
            patience: Seconds; a cell predicted to take longer is skipped as described at `NOT_AT_ALL`.
            failing: Report a side that raises an error and leave it out from then on. Otherwise the error is raised.
            table: Builds the table; by default it has `metrics` and the first metric's ratios to the sides `against`.
        """
        saved = self.numbers.setdefault(title, {"cells": [], "skipped": [], "failed": {}})
        results = Measurements(columns, rounds, **saved)
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
    """The state of one running comparison."""

    bench: Bench
    title: str
    results: Measurements
    sides: Sequence[Side]
    size: Callable[[Any], float]
    patience: float
    failing: bool
    last: dict[str, dict[Any, tuple[float, float]]] = field(default_factory=dict)
    """Last seconds and size, by side and column."""

    def __post_init__(self) -> None:
        for cell in self.results.cells:  # of a resumed run
            if "size" in cell:
                self.last.setdefault(cell["side"], {})[cell["column"]] = cell["seconds"], cell["size"]

    def open(self, column: Any, turn: int) -> list[Side]:
        """Return the sides that have not run at this column and round, in the order of the round."""
        eligible = [
            side
            for side in self.sides
            if side.name not in self.results.failed and (side.most is None or column <= side.most)
        ]
        step = max(1, len(eligible) // max(1, self.results.rounds))
        first = turn * step % len(eligible) if eligible else 0
        skipped = {cell["side"] for cell in self.results.skipped if cell["column"] == column}
        return [
            side
            for side in (*eligible[first:], *eligible[:first])
            if side.name not in skipped and turn not in self.results.of(side.name, column)
        ]

    def warm_up(self, column: Any, work: Any) -> None:
        for side in self.open(column, self.results.rounds - 1):
            if self.predicted(side, column, work) <= WARM_UP * self.patience:
                self.run(side, column, work)

    def round(self, column: Any, turn: int, work: Any) -> None:
        """Run one column's cells of one round."""
        for side in self.open(column, turn):
            predicted = self.predicted(side, column, work)
            cell = {"side": side.name, "column": column, "round": turn}
            label = f"{self.title}, round {turn + 1}: {side.name}{f', {column}' if column != '' else ''}"
            if not turn and predicted > NOT_AT_ALL * self.patience:
                self.results.skipped.append({**cell, "predicted": predicted})
                self.bench.say(f"{label}: skipped, it would take {predicted:.0f} s")
            elif (not turn or predicted <= self.patience) and (measured := self.run(side, column, work)):
                self.results.cells.append({**cell, "size": self.size(work), **measured})
                self.bench.keep()
                self.bench.say(f"{label}: {measured['seconds']:.2f} s{self.left()}")

    def predicted(self, side: Side, column: Any, work: Any) -> float:
        """Predict seconds in proportion to size, from this cell's last run or else the last column's; 0 if none ran."""
        last = self.last.get(side.name)
        if not last:
            return 0.0
        seconds, size = last.get(column) or list(last.values())[-1]
        return seconds * self.size(work) / size

    def left(self) -> str:
        """Format the estimated time left, from the side's median at expected column, else from the overall mean."""
        seconds_by_cell: defaultdict[tuple[str, Any], list[float]] = defaultdict(list)
        for cell in self.results.cells:
            seconds_by_cell[cell["side"], cell["column"]].append(cell["seconds"])
        mean = statistics.fmean(map(statistics.median, seconds_by_cell.values()))
        seconds = 0.0
        for column in self.results.columns:
            for side in self.open(column, self.results.rounds - 1):
                known = seconds_by_cell[side.name, column]
                expected = statistics.median(known) if known else mean
                seconds += expected * (self.results.rounds - len(known)) * (expected <= self.patience)
        return "" if seconds < 60 else f", about {duration(seconds)} left"

    def run(self, side: Side, column: Any, work: Any) -> Measured | None:
        """Return the measurement, or None if the side failed; a failed side does not run again."""
        try:
            measured = side.run(work)
        except Exception as error:
            if not self.failing:
                raise
            self.results.failed[side.name] = str(error) or type(error).__name__
            self.bench.say(f"{side.name} failed: {self.results.failed[side.name]}")
            return None
        self.last.setdefault(side.name, {})[column] = measured["seconds"], self.size(work)
        return measured


def duration(seconds: float) -> str:
    """Format a time in minutes, at least 1, or in hours."""
    return f"{max(1, round(seconds / 60))} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def timed(work: Callable[[], Any]) -> tuple[float, Any]:
    """Return the wall time in seconds and the result of `work`."""
    began = time.perf_counter()
    result = work()
    return time.perf_counter() - began, result
