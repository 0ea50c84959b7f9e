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
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

import psutil
from rich import box
from rich.console import Console
from rich.table import Table

from tot.decoders.files import write_json
from tot.evaluation.estimate import spread

FORMAT = 2
"""Of the files that are written."""
NOT_AT_ALL = 3.0
"""A cell predicted to take longer than the patience is done in the first round only; one predicted to take so many
times as long is not done."""
WARM_UP = 0.25
"""A cell is warmed up where that is predicted to take no longer than this share of the patience."""
BUSY = 20.0
"""Percent of all processors, above which somebody is at work."""
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
    rounds: int | None = None
    """It is asked in so many rounds only; None for all."""


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
class Results:
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

    def best(self, metric: Metric, sides: Iterable[str], column: Any) -> str | None:
        """The side with the best median at a column; None where none did it."""
        medians = {side: statistics.median(values) for side in sides if (values := self.values(metric, side, column))}
        return (min if metric.less else max)(medians, key=medians.__getitem__, default=None)

    @property
    def sides(self) -> list[str]:
        """Those that were asked."""
        done = [cell["side"] for cell in (*self.cells, *self.skipped)]
        return list(dict.fromkeys([*done, *self.failed]))


def by_metric(results: Results, metrics: Sequence[Metric], against: Sequence[str] = (), title: str = "") -> Table:
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
    results: Results,
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


def _cell(results: Results, metric: Metric, side: str, column: Any) -> str:
    """Medians with what was seen, how often if not in every round, or why there is nothing."""
    if values := results.values(metric, side, column):
        return metric.show(values) + (f", {len(values)} of {results.rounds}" if len(values) < results.rounds else "")
    if side in results.failed:
        return "failed"
    left = [cell["predicted"] for cell in results.skipped if (cell["side"], cell["column"]) == (side, column)]
    return f"(over {left[0]:.0f} s)" if left else ""


class Bench:
    """One run of a benchmark: the screen, the clock, and the file with all numbers.

    A file of the same questions that was not finished is gone on with. `seconds` is all the time there is; what is
    predicted to take longer than what is left of it is left out. Use it as a context: its end finishes the file.
    """

    def __init__(
        self,
        console: Console,
        out: Path | None,
        machine: str,
        asked: Mapping[str, Any],
        *,
        markdown: bool = False,
        seconds: float = math.inf,
    ) -> None:
        self.console = console
        self.out = out
        self.until = time.monotonic() + seconds
        self._markdown = markdown
        about = {"format": FORMAT, "machine": machine, "asked": json.loads(json.dumps(asked, default=str))}
        self.numbers: dict[str, Any] = {**about, "finished": False}
        console.print(machine)
        if out is not None and out.exists():
            self._go_on(out, about)

    def _go_on(self, out: Path, about: Mapping[str, Any]) -> None:
        try:
            before = json.loads(out.read_text())
        except ValueError:
            return
        if isinstance(before, dict) and before.get("finished") is False and about.items() <= before.items():
            self.numbers = before
            self.say(f"going on with {out}, which was stopped; delete it to begin anew")

    def __enter__(self) -> Bench:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.keep(finished=True)
        if self.out is not None and self.out.exists():
            self.console.print(f"numbers: {self.out}")

    @property
    def left(self) -> float:
        """Seconds."""
        return self.until - time.monotonic()

    def say(self, text: str) -> None:
        """Tell how it goes."""
        self.console.print(text, style="dim")

    def keep(self, **numbers: Any) -> None:
        """Put numbers into the file."""
        self.numbers |= numbers
        if self.out is not None:
            write_json(self.out, self.numbers)

    def once(self, name: str, work: Callable[[], Any]) -> Any:
        """What `work` finds, as JSON data; from the file where it was found before."""
        if name not in self.numbers:
            self.keep(**{name: work()})
        return self.numbers[name]

    def show(self, *shown: Table | str) -> None:
        """Print tables, as Markdown where that is asked for (a row a line), and lines."""
        for one in shown:
            if not isinstance(one, Table) or not self._markdown:
                self.console.print(one)
                continue
            self.console.print(f"\n{one.title}:\n", soft_wrap=True)
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
        settle: bool = False,
        metrics: Sequence[Metric] = (),
        against: Sequence[str] = (),
        table: Callable[[Results], Table] | None = None,
    ) -> Results:
        """All columns in each round, and at each all sides, another one first from round to round.

        `warm_up` gives what is asked of every cell beforehand, uncounted. `size` is how much work something asked is,
        from which times are predicted; what takes longer than `patience` (seconds) is left out, as `NOT_AT_ALL` says.
        `failing` sides are left out from then on and told, where else their errors are raised. `settle` waits before
        each cell until the machine is quiet. What is known is shown also where Ctrl-C ends it: as `table`, or with
        `metrics` and the first one's ratios to the sides `against`.
        """
        kept = self.numbers.setdefault(title, {"cells": [], "skipped": [], "failed": {}})
        results = Results(columns, rounds, **kept)
        able = [side for side in sides if side.name not in results.failed]
        work = _Work(self, title, results, able, size, patience, failing, settle)
        try:
            if any(work.open(column, turn) for turn in range(rounds) for column in columns):
                if warm_up is not None:
                    self.say(f"{title}: warm-up …")
                    for column in columns:
                        work.warm_up(column, warm_up(column))
                for turn in range(rounds):
                    asked = {column: asking(column, turn) for column in columns if work.open(column, turn)}
                    work.tell(asked, turn)
                    for column, one in asked.items():
                        work.cells(column, turn, one)
        finally:
            self.keep()
            if results.sides and table is not None:
                self.show(table(results))
            elif results.sides:
                self.show(by_metric(results, metrics or [SECONDS], against, title))
            for name, why in results.failed.items():
                self.show(f"{name} failed: {why}")
        return results


@dataclass
class _Work:
    """One comparison under way."""

    bench: Bench
    title: str
    results: Results
    sides: list[Side]
    """Those that can still go on."""
    size: Callable[[Any], float]
    patience: float
    failing: bool
    settle: bool
    last: dict[str, dict[Any, tuple[float, float]]] = field(default_factory=dict)
    """Seconds and size of each cell when it was last done."""
    told: bool = False

    def open(self, column: Any, turn: int) -> list[Side]:
        """The sides that a cell is still to be asked of, in the order of a round."""
        asked = [
            side
            for side in self.sides
            if (side.most is None or column <= side.most) and (side.rounds is None or turn < side.rounds)
        ]
        step = max(1, len(asked) // max(1, self.results.rounds))
        first = turn * step % len(asked) if asked else 0
        gone = self.results.skipped
        return [
            side
            for side in (*asked[first:], *asked[:first])
            if turn not in self.results.of(side.name, column)
            and not any((cell["side"], cell["column"]) == (side.name, column) for cell in gone)
        ]

    def warm_up(self, column: Any, asked: Any) -> None:
        for side in self.open(column, 0):
            if self.predicted(side, column, asked) <= min(WARM_UP * self.patience, self.bench.left):
                self.run(side, column, asked)

    def tell(self, asked: Mapping[Any, Any], turn: int) -> None:
        """Say how long the rest takes, once that can be told."""
        cells = [(side, column, one) for column, one in asked.items() for side in self.open(column, turn)]
        if self.told or not cells or any(side.name not in self.last for side, _, _ in cells):
            return
        self.told = True
        a_round = [self.predicted(*cell) for cell in cells]
        once = sum(seconds for seconds in a_round if seconds <= NOT_AT_ALL * self.patience)
        seconds = once + (self.results.rounds - turn - 1) * sum(each for each in a_round if each <= self.patience)
        about = f"{seconds / 60:.0f} minutes" if seconds >= 90 else f"{seconds:.0f} seconds"
        self.bench.say(f"{self.title}: {self.results.rounds - turn} rounds will take about {about}")

    def cells(self, column: Any, turn: int, asked: Any) -> None:
        """A column's cells in one round."""
        for side in self.open(column, turn):
            predicted = self.predicted(side, column, asked)
            what = f"{self.title}, round {turn + 1}: {side.name}{f', {column}' if column != '' else ''}"
            if predicted > min(self.patience * (1 if turn else NOT_AT_ALL), self.bench.left) or self.bench.left <= 0:
                if not turn or predicted > self.bench.left:
                    cell = {"side": side.name, "column": column, "round": turn, "predicted": predicted}
                    self.results.skipped.append(cell)
                    self.bench.say(f"{what}: not done, it would take {predicted:.0f} s")
            elif took := self.run(side, column, asked):
                self.results.cells.append({"side": side.name, "column": column, "round": turn, **took})
                self.bench.keep()
                self.bench.say(f"{what}: {took['seconds']:.2f} s")

    def predicted(self, side: Side, column: Any, asked: Any) -> float:
        """Seconds, in proportion to size, from the cell itself or the last column that was done; 0 where none was."""
        last = self.last.get(side.name)
        if not last:
            return 0.0
        seconds, size = last.get(column) or list(last.values())[-1]
        return seconds * self.size(asked) / size

    def run(self, side: Side, column: Any, asked: Any) -> Measured | None:
        """What it took, or None where the side failed; it is not asked again."""
        if self.settle:
            wait_until_quiet()
        try:
            took = side.run(asked)
        except Exception as error:
            if not self.failing:
                raise
            self.results.failed[side.name] = str(error) or type(error).__name__
            self.bench.say(f"{side.name} failed: {self.results.failed[side.name]}")
            self.sides.remove(side)
            return None
        self.last.setdefault(side.name, {})[column] = took["seconds"], self.size(asked)
        return took


def timed(work: Callable[[], Any]) -> tuple[float, Any]:
    """Seconds of wall time, and what the work gave."""
    began = time.perf_counter()
    done = work()
    return time.perf_counter() - began, done


def wait_until_quiet(most: float = 5.0) -> None:
    """What a side still does after its answer (some servers poll for a second) is not to slow the next one: wait for
    that, up to `most` seconds."""
    end = time.monotonic() + most
    while psutil.cpu_percent(interval=0.25) > BUSY and time.monotonic() < end:
        pass
