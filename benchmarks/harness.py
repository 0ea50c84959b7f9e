"""The harness of all benchmarks: sides take turns at the same work, and every cell is stored.

A cell is one side at one column (a number of branches, for example) in one round, with the measurements of the side and
"seconds" of wall time. The file is written after each cell, and a stopped run resumes from it. Tables have medians,
ratios and ranges.
"""

from __future__ import annotations

import json
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, get_origin

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator
from rich import box
from rich.console import Console
from rich.table import Table

from tot.decoders.errors import OptionError, TotError
from tot.decoders.files import write_json

FORMAT = 8
"""Version of the results file format."""
_WIDE = 400

Measured = dict[str, Any]


def spread(values: Sequence[float], form: str = ".1f") -> str:
    """Format the median of at least one value with the range, such as "226.1 (221.0 to 230.4)"."""
    median = f"{statistics.median(values):{form}}"
    return median if len(values) == 1 else f"{median} ({min(values):{form}} to {max(values):{form}})"


class SideError(TotError):
    """A side is not available or failed; the other sides are not affected."""


class BenchOptions(BaseModel):
    """Options of all benchmarks. Tuple options also accept a comma-separated string."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    extends: ClassVar[str] = ""
    """The option whose higher value extends a finished run, such as a number of questions."""

    model: str = Field("smollm2-135m", description="A model name, a hub id, a folder or a .gguf file.")
    out: Path | None = Field(None, description="Write the numbers to this .json file after each cell, or resume it.")
    markdown: bool = Field(False, description="Print the tables as Markdown.")

    @field_validator("*", mode="before")
    @classmethod
    def _listed(cls, value: Any, info: ValidationInfo) -> Any:
        is_tuple = get_origin(cls.model_fields[info.field_name or ""].annotation) is tuple
        return tuple(part.strip() for part in value.split(",")) if is_tuple and isinstance(value, str) else value


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


def plain(form: str) -> Callable[[Sequence[float]], str]:
    """Return a function that formats the median only."""
    return lambda values: f"{statistics.median(values):{form}}"


def times(ratios: Sequence[float]) -> str:
    """Format the median and range of ratios, as "2.05x (1.98 to 2.11)"; empty without ratios."""
    known = [ratio for ratio in ratios if not math.isnan(ratio)]
    return spread(known, ".2f").replace(" ", "x ", 1) + "x" * (len(known) == 1) if known else ""


RATE = Metric("new tokens/s", lambda cell: cell["tokens"] / cell["seconds"])
SECONDS = Metric("seconds", lambda cell: cell["seconds"], less=True)


@dataclass
class Cells:
    """The cells of one comparison."""

    columns: Sequence[Any]
    rounds: int
    all: list[Measured]
    failed: dict[str, str] = field(default_factory=dict)
    """Error messages of the sides that failed; they run again when the file is resumed."""

    def of(self, side: str, column: Any = None) -> dict[int, Measured]:
        """Return a side's cells by round; by default at the first column. A file may have more rounds."""
        column = self.columns[0] if column is None else column
        here = (cell for cell in self.all if (cell["side"], cell["column"]) == (side, column))
        return {cell["round"]: cell for cell in here if cell["round"] < self.rounds}

    def values(self, metric: Metric, side: str, column: Any = None) -> list[float]:
        """Return a metric's numbers in the order of rounds, without missing ones."""
        numbers = (metric.of(cell) for _, cell in sorted(self.of(side, column).items()))
        return [value for value in numbers if value is not None]

    def ratios(self, metric: Metric, ours: str, theirs: str, column: Any = None) -> list[float]:
        """Return the metric's ratios, one for each round that both sides completed."""
        mine, other = self.of(ours, column), self.of(theirs, column)
        return [metric.ratio(mine[turn], other[turn]) for turn in sorted(mine.keys() & other.keys())]

    @property
    def sides(self) -> list[str]:
        """Names of the sides with a cell."""
        return list(dict.fromkeys(cell["side"] for cell in self.all))


def by_metric(cells: Cells, metrics: Sequence[Metric], against: Sequence[str] = (), title: str = "") -> Table:
    """Build a table with one row per side: its metrics, and the first metric's ratios to the sides in `against`."""
    metrics = [metric for metric in metrics if any(cells.values(metric, side) for side in cells.sides)]
    first, *rest = metrics or [SECONDS]
    heads = [first.heading, *(f"against {name}" for name in against), *(metric.heading for metric in rest)]
    table = Table("", *heads, title=title)
    for side in cells.sides:
        ratios = [times(cells.ratios(first, side, base)) for base in against]
        shown = [metric.show(found) if (found := cells.values(metric, side)) else "" for metric in (first, *rest)]
        table.add_row(side, shown[0], *ratios, *shown[1:])
    return table


def by_column(cells: Cells, metrics: Sequence[Metric], title: str, ratios: Any = ()) -> Table:
    """Build a table of metrics by side and column, each followed by the ratios of pairs of sides."""

    def shown(metric: Metric, side: str, column: Any) -> str:
        values = cells.values(metric, side, column)
        return metric.show(values) if values else "failed" if side in cells.failed else ""

    table = Table("", *map(str, cells.columns), title=title)
    for metric in metrics:
        first = metric is metrics[0]
        suffix = "" if first else f": {metric.heading}"
        for side in dict.fromkeys([*cells.sides, *cells.failed]):
            if first or any(cells.values(metric, side, column) for column in cells.columns):
                table.add_row(side + suffix, *(shown(metric, side, column) for column in cells.columns))
        for ours, theirs in ratios:
            found = [times(cells.ratios(metric, ours, theirs, column)) for column in cells.columns]
            if any(found):
                table.add_row(f"{ours} / {theirs}{suffix}", *found)
    return table


class Bench:
    """One run of a benchmark: prints to the console and writes all numbers to a file.

    A file with the same options and machine is resumed. Any other file raises OptionError.
    """

    def __init__(self, options: BenchOptions, console: Console, machine: str) -> None:
        self.console, self.out, self._markdown = console, options.out, options.markdown
        asked = options.model_dump(mode="json", exclude={"out", "markdown", "picture", options.extends})
        self.numbers: dict[str, Any] = {"format": FORMAT, "machine": machine, "asked": asked}
        console.print(machine)
        if self.out is not None and self.out.exists():
            try:
                previous = dict(json.loads(self.out.read_text()))
            except (TypeError, ValueError):  # not a results file
                previous = {}
            if not self.numbers.items() <= previous.items():
                raise OptionError(
                    f"{self.out} has no results of these options on this machine: delete it, or give another --out"
                )
            self.numbers = previous
            self.say(f"resuming {self.out}; delete it to start over")

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
        sides: Mapping[str, Callable[[Any], Measured]],
        work: Sequence[Any] | Callable[[Any, int], Any],
        table: Callable[[Cells], Table],
        *,
        rounds: int = 0,
        columns: Sequence[Any] = ("",),
        warm_up: bool = False,
    ) -> Cells:
        """Run every side at every column in each round; the first side changes from round to round.

        A side that raises SideError is left out and reported. The table is printed also after Ctrl-C.

        Args:
            title: Key of the cells in the file.
            sides: By name, a function that does the work and returns its measurement, including "seconds".
            work: The work that every side gets in each round, or a function of column and round.
            table: Returns the table of the cells.
            rounds: Number of rounds, if `work` is a function.
            columns: What the sides are compared at.
            warm_up: Whether every side first does the work of its first round, unmeasured.
        """
        stored, names = self.numbers.setdefault(title, []), list(sides)
        work_of = work if callable(work) else lambda _, turn: work[turn]
        rounds = rounds if callable(work) else len(work)
        cells = Cells(columns, rounds, stored)

        def missing(column: Any, turn: int) -> list[str]:
            """Return the sides that have not run at this column and round, in the order of the round."""
            first = turn * max(1, len(names) // rounds) % len(names)
            return [name for name in (*names[first:], *names[:first]) if turn not in cells.of(name, column)]

        def run(name: str, column: Any, turn: int, given: Any, measure: bool) -> None:
            label = f"{title}, round {turn + 1}: {name}" + (f", {column}" if column != "" else "")
            try:
                measured = sides[name](given)
            except SideError as error:
                cells.failed[name] = str(error)
                self.say(f"{name} failed: {error}")
            else:
                if measure:
                    stored.append({"side": name, "column": column, "round": turn, **measured})
                self.say(f"{label}{'' if measure else ', warm-up'}: {measured['seconds']:.2f} s{left()}")
            self.keep()

        def left() -> str:
            """Format the minutes left if all other cells take the mean of the measured ones."""
            mean = statistics.fmean(cell["seconds"] for cell in stored) if stored else 0.0
            minutes = mean * (len(names) * len(columns) * rounds - len(stored)) / 60
            return f", about {minutes:.0f} min left" if minutes >= 1 else ""

        try:
            for measure in (False, True) if warm_up else (True,):
                for turn in range(rounds) if measure else (rounds - 1,):
                    for column in columns:
                        if waiting := [name for name in missing(column, turn) if name not in cells.failed]:
                            given = work_of(column, turn if measure else 0)
                            for name in waiting:
                                run(name, column, turn, given, measure)
        finally:
            self.keep()
            if stored:
                self.show(table(cells))
            self.show(*(f"{name} failed: {why}" for name, why in cells.failed.items()))
        return cells


def timed(work: Callable[[], Any]) -> tuple[float, Any]:
    """Return the wall time in seconds and the result of `work`."""
    began = time.perf_counter()
    result = work()
    return time.perf_counter() - began, result
