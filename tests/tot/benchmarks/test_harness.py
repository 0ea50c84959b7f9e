"""The order of measurements, the statistics of their times, and the results file, also of an interrupted run."""

from __future__ import annotations

import io
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from rich.table import Table

from benchmarks.branches import Branches
from benchmarks.harness import (
    FORMAT,
    RATE,
    SECONDS,
    Bench,
    BenchOptions,
    Cells,
    Metric,
    SideError,
    by_column,
    by_metric,
    percent,
    times,
)
from tot.decoders.errors import OptionError


@pytest.fixture
def screen() -> io.StringIO:
    return io.StringIO()


@pytest.fixture
def bench(screen: io.StringIO, tmp_path: Path) -> Callable[..., Bench]:
    def make(**options: Any) -> Bench:
        settings = BenchOptions(model="m", out=tmp_path / "n.json", **options)
        return Bench(settings, Console(file=screen, width=200), "a machine")

    return make


def work(count: int, turn: int) -> Branches:
    return Branches([turn, 1, 2], count, 4)


def compare(bench: Bench, sides: Any, columns: Any = (1, 4), rounds: int = 1, **options: Any) -> Cells:
    return bench.compare("work", sides, work, lambda cells: Table(), columns=columns, rounds=rounds, **options)


def second(samples: int) -> float:
    return 1.0


def test_sides_alternate_after_a_warm_up_that_is_not_counted(bench: Any, paced: Any, log: Any) -> None:
    sides = {"a": paced("a", second), "b": paced("b", second)}
    cells = compare(bench(), sides, rounds=2, warm_up=True)
    assert log[:4] == [("b", 1), ("a", 1), ("b", 4), ("a", 4)]
    assert log[4:] == [("a", 1), ("b", 1), ("a", 4), ("b", 4), ("b", 1), ("a", 1), ("b", 4), ("a", 4)]
    assert [cell["round"] for cell in cells.all] == [0] * 4 + [1] * 4
    assert compare(bench(), sides, rounds=2, warm_up=True).all == cells.all  # a finished run: no warm-up
    assert len(log) == 12


def test_a_failing_side_is_reported_and_the_others_continue(bench: Any, paced: Any, log: Any, screen: Any) -> None:
    def fail(samples: int) -> float:
        raise SideError(f"no room for {samples}")

    cells = compare(bench(), {"bad": paced("bad", fail), "good": paced("good", lambda samples: 2.0)}, rounds=2)
    assert cells.failed == {"bad": "no room for 1"}
    assert "bad failed: no room for 1" in screen.getvalue()
    assert [name for name, _ in log] == ["bad", "good", "good", "good", "good"]
    assert cells.values(RATE, "good", 4) == [8.0, 8.0]
    compare(bench(), {"bad": paced("bad", second)})  # it runs again when the file is resumed
    assert log[-2:] == [("bad", 1), ("bad", 4)]


def test_a_run_resumes_from_its_file_and_more_rounds_extend_it(bench: Any, tmp_path: Path) -> None:
    done: list[int] = []

    def side(turn: int) -> dict[str, float]:
        if len(done) == 2:
            done.append(-1)
            raise KeyboardInterrupt
        done.append(turn)
        return {"seconds": 1.0 + turn}

    def run(rounds: int) -> Cells:
        cells: Cells = bench().compare("work", {"a": side}, range(rounds), lambda cells: Table())
        return cells

    with pytest.raises(KeyboardInterrupt):
        run(4)
    assert [cell["seconds"] for cell in json.loads((tmp_path / "n.json").read_text())["work"]] == [1.0, 2.0]
    for rounds, calls in ((4, [0, 1, -1, 2, 3]), (5, [0, 1, -1, 2, 3, 4]), (2, [0, 1, -1, 2, 3, 4])):
        assert run(rounds).values(SECONDS, "a") == [1.0, 2.0, 3.0, 4.0, 5.0][:rounds]
        assert done == calls


def test_the_remaining_time_is_reported(bench: Any, screen: io.StringIO) -> None:
    sides = {name: lambda turn, seconds=seconds: {"seconds": seconds} for name, seconds in (("a", 60.0), ("b", 240.0))}
    bench().compare("work", sides, range(3), lambda cells: Table())
    remaining = [line.rpartition(" s")[2] for line in screen.getvalue().splitlines() if line.startswith("work, round")]
    assert remaining[:2] == [", about 5 min left", ", about 10 min left"]
    assert remaining[-1] == ""


def test_a_file_of_another_run_is_not_overwritten(bench: Any, tmp_path: Path) -> None:
    about = {"format": FORMAT, "machine": "a machine", "asked": {"model": "m"}}
    others = [json.dumps(about | changes) for changes in ({"asked": {}}, {"machine": "b"}, {"format": 1})]
    for other in (*others, "[no JSON", "[1]"):
        (tmp_path / "n.json").write_text(other)
        with pytest.raises(OptionError, match=r"n.json has no results of these options on this machine: delete it"):
            bench()
        assert (tmp_path / "n.json").read_text() == other


def measured(seconds: dict[str, dict[int, list[float]]], rounds: int) -> Cells:
    """Return cells with these seconds by side, column and round; every cell has 100 tokens."""
    cells = [
        {"side": side, "column": column, "round": turn, "seconds": s, "tokens": 100}
        for side, row in seconds.items()
        for column, taken in row.items()
        for turn, s in enumerate(taken)
    ]
    return Cells(sorted({cell["column"] for cell in cells}), rounds, cells)  # type: ignore[type-var]


def rendered(table: Any) -> list[list[str]]:
    return [list(row) for row in zip(*(column.cells for column in table.columns), strict=True)]


def test_ratios_use_only_rounds_that_both_sides_measured() -> None:
    cells = measured({"ours": {4: [1.0, 2.0, 4.0]}, "theirs": {4: [3.0, 10.0]}}, 3)
    assert cells.ratios(RATE, "ours", "theirs") == cells.ratios(SECONDS, "ours", "theirs") == [3.0, 5.0]
    assert cells.ratios(RATE, "ours", "missing") == []
    assert [times([]), times([2.0]), times([2.0, math.nan, 3.0])] == ["", "2.00x", "2.50x (2.00 to 3.00)"]


def test_a_row_marks_sides_that_failed() -> None:
    cells = measured({"a": {1: [1.0, 2.0], 3: [4.0]}, "b": {15: [1.0]}}, 2)
    cells.failed["c"] = "it died"
    table = rendered(by_column(cells, [RATE], "title", ratios=[("a", "b")]))
    assert table[0] == ["a", "75.0 (50.0 to 100.0)", "25.0", ""]
    assert table[2] == ["c", *["failed"] * 3]
    assert len(table) == 3  # a and b have no common column for a ratio


def test_a_table_has_ratios_beside_the_first_metric_and_no_empty_columns() -> None:
    rate = Metric("share", lambda cell: cell["tokens"] / 200, percent)
    table = by_metric(measured({"a": {1: [1.0, 2.0]}, "b": {1: [2.0, 6.0]}}, 2), [SECONDS, rate, NEVER], ["b"])
    assert [column.header for column in table.columns] == ["", "seconds", "against b", "share"]
    assert rendered(table) == [
        ["a", "1.5 (1.0 to 2.0)", "2.50x (2.00 to 3.00)", "50%"],
        ["b", "4.0 (2.0 to 6.0)", "1.00x (1.00 to 1.00)", "50%"],
    ]


NEVER = Metric("never", lambda cell: None)


def test_markdown_has_one_line_a_row(screen: io.StringIO) -> None:
    cells = measured({"a side with a long name": {1: [1.0]}, "another one with a long name": {1: [2.0]}}, 1)
    bench = Bench(BenchOptions(markdown=True), Console(file=screen, width=40), "a machine")
    bench.show(by_metric(cells, [SECONDS], ["another one with a long name"], "seconds of sides"))
    lines = [line for line in screen.getvalue().splitlines() if line.startswith("|")]
    assert len(lines) == 4
    assert [cell.strip() for cell in lines[-2].split("|")[1:4]] == ["a side with a long name", "1.0", "2.00x"]
