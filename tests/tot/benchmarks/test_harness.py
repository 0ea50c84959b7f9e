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

from benchmarks.harness import (
    FORMAT,
    RATE,
    SECONDS,
    Bench,
    Measurements,
    Metric,
    Side,
    by_column,
    by_metric,
    percent,
    times,
)
from benchmarks.options import BenchOptions, PeersOptions
from benchmarks.workloads import Waves, branches, rows
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


def asking(count: int, turn: int) -> Waves:
    return branches([turn, 1, 2], count, 4)


def compare(bench: Bench, *sides: Side, columns: Any = (1, 4), rounds: int = 1, **options: Any) -> Measurements:
    options = {"size": rows, "failing": True, **options}
    return bench.compare("work", sides, options.pop("asking", asking), columns=columns, rounds=rounds, **options)


def test_sides_alternate_and_each_round_starts_with_another(bench: Any, paced: Any, log: Any) -> None:
    compare(bench(), paced("a", lambda samples: 1.0), paced("b", lambda samples: 1.0), rounds=2)
    assert log == [("a", 1), ("b", 1), ("a", 4), ("b", 4), ("b", 1), ("a", 1), ("b", 4), ("a", 4)]


def test_warm_ups_are_not_counted(bench: Any, paced: Any, log: Any) -> None:
    results = compare(bench(), paced("a", lambda samples: 1.0), warm_up=lambda column: asking(column, 9))
    assert log == [("a", 1), ("a", 4)] * 2
    assert len(results.cells) == 2


def test_a_slow_warm_up_is_skipped(bench: Any, paced: Any, log: Any) -> None:
    slow = paced("slow", lambda samples: 10.0 * samples)
    compare(bench(), slow, columns=(1, 2), patience=60.0, warm_up=lambda column: asking(column, 9))
    assert log == [("slow", 1), ("slow", 1), ("slow", 2)]  # 20 s exceed a quarter of a minute


def test_cells_slower_than_the_patience_run_in_the_first_round_only(bench: Any, paced: Any, log: Any) -> None:
    results = compare(bench(), paced("slow", lambda samples: 20.0 * samples), patience=60.0, rounds=3)
    assert log == [("slow", 1), ("slow", 4), ("slow", 1), ("slow", 1)]
    assert [sorted(results.of("slow", column)) for column in (4, 1)] == [[0], [0, 1, 2]]


def test_cells_over_three_times_the_patience_are_skipped(bench: Any, paced: Any, log: Any) -> None:
    results = compare(bench(), paced("slow", lambda samples: 20.0 * samples), columns=(1, 10), patience=60.0)
    assert log == [("slow", 1)]
    assert [(cell["column"], cell["predicted"]) for cell in results.skipped] == [(10, 200.0)]


def test_round_one_is_predicted_from_the_warm_up(bench: Any, paced: Any, log: Any) -> None:
    results = compare(
        bench(),
        paced("slow", lambda samples: 10.0 * samples),
        columns=(1,),
        patience=60.0,
        asking=lambda count, turn: branches([1] * 10, count, 130),  # 140 rows
        warm_up=lambda count: branches([1, 2, 3], count, 4),  # 7 rows in 10 s
    )
    assert log == [("slow", 1)]
    assert results.skipped[0]["predicted"] == 200.0


def test_a_side_is_not_measured_beyond_its_maximum(bench: Any, paced: Any, log: Any) -> None:
    compare(bench(), paced("one", lambda samples: 1.0, most=1), paced("any", lambda samples: 1.0), rounds=1)
    assert sorted(log) == [("any", 1), ("any", 4), ("one", 1)]


def test_a_failing_side_is_reported_and_the_others_continue(bench: Any, paced: Any, log: Any) -> None:
    def fail(samples: int) -> float:
        raise RuntimeError(f"no room for {samples}")

    results = compare(bench(), paced("bad", fail), paced("good", lambda samples: 2.0), rounds=2)
    assert results.failed == {"bad": "no room for 1"}
    assert [name for name, _ in log] == ["bad", "good", "good", "good", "good"]
    assert results.values(RATE, "good", 4) == [8.0, 8.0]


def test_an_error_is_raised_if_no_side_may_fail(bench: Any) -> None:
    def fail(work: Any) -> Any:
        raise ValueError("why")

    with pytest.raises(ValueError, match="why"):
        bench().compare("work", [Side("a", fail)], lambda column, turn: turn, rounds=1)


def test_a_run_resumes_from_its_file_and_more_rounds_extend_it(bench: Any, tmp_path: Path) -> None:
    done: list[int] = []

    def work(turn: int) -> dict[str, float]:
        if len(done) == 2:
            done.append(-1)
            raise KeyboardInterrupt
        done.append(turn)
        return {"seconds": 1.0 + turn}

    with pytest.raises(KeyboardInterrupt):
        bench().compare("work", [Side("a", work)], lambda column, turn: turn, rounds=4)
    assert [cell["seconds"] for cell in json.loads((tmp_path / "n.json").read_text())["work"]["cells"]] == [1.0, 2.0]
    results = bench().compare("work", [Side("a", work)], lambda column, turn: turn, rounds=4)
    assert done == [0, 1, -1, 2, 3]
    assert results.values(SECONDS, "a") == [1.0, 2.0, 3.0, 4.0]
    extended = bench().compare("work", [Side("a", work)], lambda column, turn: turn, rounds=5)
    assert done == [0, 1, -1, 2, 3, 4]
    assert extended.values(SECONDS, "a") == [1.0, 2.0, 3.0, 4.0, 5.0]
    first = bench().compare("work", [Side("a", work)], lambda column, turn: turn, rounds=2)
    assert done == [0, 1, -1, 2, 3, 4]
    assert first.values(SECONDS, "a") == [1.0, 2.0]


def test_the_remaining_time_is_reported_from_the_first_cell_on(bench: Any, screen: io.StringIO) -> None:
    taken = {"a": 60.0, "b": 240.0, "tired": 5000.0}
    sides = [Side(name, lambda turn, seconds=seconds: {"seconds": seconds}) for name, seconds in taken.items()]
    bench().compare("work", sides, lambda column, turn: turn, rounds=3, patience=2000.0)
    remaining = [line.rpartition(" s")[2] for line in screen.getvalue().splitlines() if line.startswith("work, round")]
    # First every cell is assumed to take one minute, then two and a half; then the tired side drops out.
    assert remaining[:3] == [", about 8 min left", ", about 18 min left", ", about 10 min left"]
    assert remaining[-2:] == [", about 4 min left", ""]


def test_a_file_of_another_run_is_not_overwritten(bench: Any, tmp_path: Path) -> None:
    about = {"format": FORMAT, "machine": "a machine", "asked": {"model": "m"}}
    for changes, named in (({"asked": {}}, "model"), ({"machine": "b"}, "machine")):
        (tmp_path / "n.json").write_text(json.dumps(about | changes))
        with pytest.raises(OptionError, match=f"n.json was measured with other {named}: delete it"):
            bench()
    for other in ("[no JSON", "[1]", '{"answer": "36"}'):
        (tmp_path / "n.json").write_text(other)
        with pytest.raises(OptionError, match=r"n.json has no results: delete it, or give another --out"):
            bench()
        assert (tmp_path / "n.json").read_text() == other


@pytest.fixture
def results() -> Callable[..., Measurements]:
    """Make measurements from seconds by side, column and round; every cell drew 100 tokens."""

    def make(seconds: dict[str, dict[int, list[float]]], rounds: int) -> Measurements:
        cells = [
            {"side": side, "column": column, "round": turn, "seconds": s, "tokens": 100}
            for side, row in seconds.items()
            for column, taken in row.items()
            for turn, s in enumerate(taken)
        ]
        return Measurements(sorted({cell["column"] for cell in cells}), rounds, cells)  # type: ignore[type-var]

    return make


def rendered(table: Any) -> list[list[str]]:
    return [list(row) for row in zip(*(column.cells for column in table.columns), strict=True)]


def test_ratios_use_only_rounds_that_both_sides_measured(results: Any) -> None:
    measured = results({"ours": {4: [1.0, 2.0, 4.0]}, "theirs": {4: [3.0, 10.0]}}, 3)
    assert measured.ratios(RATE, "ours", "theirs") == measured.ratios(SECONDS, "ours", "theirs") == [3.0, 5.0]
    assert measured.ratios(RATE, "ours", "nobody") == []  # language: ok


def test_a_row_marks_cells_measured_once_skipped_and_not_measured(results: Any) -> None:
    measured = results({"a": {1: [1.0, 2.0], 3: [4.0]}, "b": {15: [1.0], 32: [1.0]}}, 2)
    measured.skipped.append({"side": "a", "column": 15, "round": 0, "predicted": 130.0})
    measured.failed["c"] = "it died"
    table = rendered(by_column(measured, RATE, "title", ratios=[("a", "b")]))
    assert table[0] == ["a", "75.0 (50.0 to 100.0)", "25.0, 1 of 2", "(over 130 s)", ""]
    assert table[2] == ["c", *["failed"] * 4]
    assert len(table) == 3  # a and b have no common column for a ratio


def test_a_table_has_ratios_beside_the_first_metric_and_no_empty_columns(results: Any) -> None:
    measured = results({"a": {1: [1.0, 2.0]}, "b": {1: [2.0, 6.0]}}, 2)
    rate = Metric("share", lambda took: took["tokens"] / 200, percent)
    never = Metric("never", lambda took: None)
    table = by_metric(measured, [SECONDS, rate, never], ["b"])
    assert [column.header for column in table.columns] == ["", "seconds", "against b", "share"]
    assert rendered(table) == [
        ["a", "1.5 (1.0 to 2.0)", "2.50x (2.00 to 3.00)", "50%"],
        ["b", "4.0 (2.0 to 6.0)", "1.00x (1.00 to 1.00)", "50%"],
    ]


def test_ratios_are_formatted() -> None:
    assert [times([]), times([2.0]), times([2.0, math.nan, 3.0])] == ["", "2.00x", "2.50x (2.00 to 3.00)"]


def test_markdown_has_one_line_a_row(screen: io.StringIO, results: Any) -> None:
    measured = results({"a side with a long name": {1: [1.0]}, "another one with a long name": {1: [2.0]}}, 1)
    bench = Bench(BenchOptions(markdown=True), Console(file=screen, width=40), "a machine")
    bench.show(by_metric(measured, [SECONDS], ["another one with a long name"], "seconds of sides"))
    lines = [line for line in screen.getvalue().splitlines() if line.startswith("|")]
    assert len(lines) == 4
    assert [cell.strip() for cell in lines[-2].split("|")[1:4]] == ["a side with a long name", "1.0", "2.00x"]


def test_a_comma_separated_option_has_several_values() -> None:
    options = PeersOptions(parts="limit, decode", branches="15,1,15")  # type: ignore[arg-type]
    assert (options.parts, options.branches) == (("limit", "decode"), (1, 15))


def test_a_resumed_run_knows_the_times_of_its_cells(bench: Any, paced: Any, log: Any) -> None:
    slow = paced("slow", lambda samples: 20.0 * samples)
    compare(bench(), slow, columns=(1, 4), patience=60.0)
    log.clear()
    results = compare(bench(), slow, columns=(1, 4), rounds=3, patience=60.0)
    assert log == [("slow", 1), ("slow", 1)]  # the other column takes 80 s, as measured before
    assert len(results.cells) == 4
