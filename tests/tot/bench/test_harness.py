"""Who is asked what, in which order; what is made of the times; what is in the file, also when it was stopped."""

from __future__ import annotations

import io
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from tot.bench.harness import RATE, SECONDS, Bench, Measurements, Metric, Side, by_column, by_metric, percent, times
from tot.bench.options import BenchOptions, PeersOptions
from tot.bench.workloads import Waves, branches, rows


@pytest.fixture
def screen() -> io.StringIO:
    return io.StringIO()


@pytest.fixture
def bench(screen: io.StringIO, tmp_path: Path) -> Callable[..., Bench]:
    def make(**options: Any) -> Bench:
        given = BenchOptions(model="m", out=tmp_path / "n.json", **options)
        return Bench(given, Console(file=screen, width=200), "a machine")

    return make


def asking(count: int, turn: int) -> Waves:
    return branches([turn, 1, 2], count, 4)


def compare(bench: Bench, *sides: Side, columns: Any = (1, 4), rounds: int = 1, **options: Any) -> Measurements:
    options = {"size": rows, "failing": True, **options}
    return bench.compare("work", sides, options.pop("asking", asking), columns=columns, rounds=rounds, **options)


def test_sides_take_turns_and_another_is_first_every_round(bench: Any, paced: Any, log: Any) -> None:
    compare(bench(), paced("a", lambda samples: 1.0), paced("b", lambda samples: 1.0), rounds=2)
    assert log == [("a", 1), ("b", 1), ("a", 4), ("b", 4), ("b", 1), ("a", 1), ("b", 4), ("a", 4)]


def test_warm_ups_are_run_and_not_counted(bench: Any, paced: Any, log: Any) -> None:
    results = compare(bench(), paced("a", lambda samples: 1.0), warm_up=lambda column: asking(column, 9))
    assert log == [("a", 1), ("a", 4)] * 2
    assert len(results.cells) == 2


def test_a_warm_up_that_would_take_long_is_left_out(bench: Any, paced: Any, log: Any) -> None:
    slow = paced("slow", lambda samples: 10.0 * samples)
    compare(bench(), slow, columns=(1, 2), patience=60.0, warm_up=lambda column: asking(column, 9))
    assert log == [("slow", 1), ("slow", 1), ("slow", 2)]  # 20 s are more than a quarter of a minute


def test_what_takes_longer_than_the_patience_is_done_in_the_first_round_only(bench: Any, paced: Any, log: Any) -> None:
    results = compare(bench(), paced("slow", lambda samples: 20.0 * samples), patience=60.0, rounds=3)
    assert log == [("slow", 1), ("slow", 4), ("slow", 1), ("slow", 1)]
    assert [sorted(results.of("slow", column)) for column in (4, 1)] == [[0], [0, 1, 2]]


def test_what_takes_three_times_the_patience_is_not_done_and_shown_so(bench: Any, paced: Any, log: Any) -> None:
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


def test_a_side_is_not_asked_beyond_its_most(bench: Any, paced: Any, log: Any) -> None:
    compare(bench(), paced("one", lambda samples: 1.0, most=1), paced("any", lambda samples: 1.0), rounds=1)
    assert sorted(log) == [("any", 1), ("any", 4), ("one", 1)]


def test_a_side_that_fails_is_told_and_the_others_go_on(bench: Any, paced: Any, log: Any) -> None:
    def fail(samples: int) -> float:
        raise RuntimeError(f"no room for {samples}")

    results = compare(bench(), paced("bad", fail), paced("good", lambda samples: 2.0), rounds=2)
    assert results.failed == {"bad": "no room for 1"}
    assert [name for name, _ in log] == ["bad", "good", "good", "good", "good"]
    assert results.values(RATE, "good", 4) == [8.0, 8.0]


def test_an_error_is_raised_where_no_side_may_fail(bench: Any) -> None:
    def fail(asked: Any) -> Any:
        raise ValueError("why")

    with pytest.raises(ValueError, match="why"):
        bench().compare("work", [Side("a", fail)], lambda column, turn: turn, rounds=1)


def test_a_stopped_run_goes_on_from_its_file(bench: Any, tmp_path: Path) -> None:
    done: list[int] = []

    def work(turn: int) -> dict[str, float]:
        if len(done) == 2:
            done.append(-1)
            raise KeyboardInterrupt
        done.append(turn)
        return {"seconds": 1.0 + turn}

    with pytest.raises(KeyboardInterrupt), bench() as stopped:
        stopped.compare("work", [Side("a", work)], lambda column, turn: turn, rounds=4)
    assert [cell["seconds"] for cell in json.loads((tmp_path / "n.json").read_text())["work"]["cells"]] == [1.0, 2.0]
    with bench() as again:
        results = again.compare("work", [Side("a", work)], lambda column, turn: turn, rounds=4)
    assert done == [0, 1, -1, 2, 3]
    assert results.values(SECONDS, "a") == [1.0, 2.0, 3.0, 4.0]
    with bench() as anew:  # the file is of a run that came to its end
        assert "work" not in anew.numbers


def test_what_is_left_is_told_from_the_first_cell_on(bench: Any, screen: io.StringIO) -> None:
    taken = {"a": 60.0, "b": 240.0, "tired": 5000.0}
    sides = [Side(name, lambda turn, seconds=seconds: {"seconds": seconds}) for name, seconds in taken.items()]
    bench().compare("work", sides, lambda column, turn: turn, rounds=3, patience=2000.0)
    told = [line.rpartition(" s")[2] for line in screen.getvalue().splitlines() if line.startswith("work, round")]
    # All is taken for a minute, then for two and a half; then the tired side is known not to be asked again.
    assert told[:3] == [", about 8 min left", ", about 18 min left", ", about 10 min left"]
    assert told[-2:] == [", about 4 min left", ""]


def test_a_file_of_other_questions_is_not_gone_on_with(bench: Any, tmp_path: Path) -> None:
    (tmp_path / "n.json").write_text(json.dumps({"format": 3, "machine": "a machine", "asked": {}, "finished": False}))
    assert bench().numbers["asked"] == {"model": "m"}
    (tmp_path / "n.json").write_text("[no JSON")
    assert bench().numbers["asked"] == {"model": "m"}


@pytest.fixture
def results() -> Callable[..., Measurements]:
    """From seconds by side, column and round; every cell drew 100 tokens."""

    def make(seconds: dict[str, dict[int, list[float]]], rounds: int) -> Measurements:
        cells = [
            {"side": side, "column": column, "round": turn, "seconds": s, "tokens": 100}
            for side, row in seconds.items()
            for column, taken in row.items()
            for turn, s in enumerate(taken)
        ]
        return Measurements(sorted({cell["column"] for cell in cells}), rounds, cells)  # type: ignore[type-var]

    return make


def shown(table: Any) -> list[list[str]]:
    return [list(row) for row in zip(*(column.cells for column in table.columns), strict=True)]


def test_ratios_are_those_of_rounds_that_both_did(results: Any) -> None:
    found = results({"ours": {4: [1.0, 2.0, 4.0]}, "theirs": {4: [3.0, 10.0]}}, 3)
    assert found.ratios(RATE, "ours", "theirs") == found.ratios(SECONDS, "ours", "theirs") == [3.0, 5.0]
    assert found.ratios(RATE, "ours", "nobody") == []


def test_a_row_says_what_was_done_once_skipped_and_not_asked(results: Any) -> None:
    found = results({"a": {1: [1.0, 2.0], 3: [4.0]}, "b": {15: [1.0], 32: [1.0]}}, 2)
    found.skipped.append({"side": "a", "column": 15, "round": 0, "predicted": 130.0})
    found.failed["c"] = "it died"
    table = shown(by_column(found, RATE, "title", ratios=[("a", "b")]))
    assert table[0] == ["a", "75.0 (50.0 to 100.0)", "25.0, 1 of 2", "(over 130 s)", ""]
    assert table[2] == ["c", *["failed"] * 4]
    assert len(table) == 3  # there is no ratio of a and b


def test_a_table_has_ratios_beside_the_first_metric_and_no_empty_columns(results: Any) -> None:
    found = results({"a": {1: [1.0, 2.0]}, "b": {1: [2.0, 6.0]}}, 2)
    rate = Metric("share", lambda took: took["tokens"] / 200, percent)
    never = Metric("never", lambda took: None)
    table = by_metric(found, [SECONDS, rate, never], ["b"])
    assert [column.header for column in table.columns] == ["", "seconds", "against b", "share"]
    assert shown(table) == [
        ["a", "1.5 (1.0 to 2.0)", "2.50x (2.00 to 3.00)", "50%"],
        ["b", "4.0 (2.0 to 6.0)", "1.00x (1.00 to 1.00)", "50%"],
    ]


def test_ratios_as_texts() -> None:
    assert [times([]), times([2.0]), times([2.0, math.nan, 3.0])] == ["", "2.00x", "2.50x (2.00 to 3.00)"]


def test_markdown_has_a_row_a_line(screen: io.StringIO, results: Any) -> None:
    found = results({"a side with a long name": {1: [1.0]}, "another one with a long name": {1: [2.0]}}, 1)
    bench = Bench(BenchOptions(markdown=True), Console(file=screen, width=40), "a machine")
    bench.show(by_metric(found, [SECONDS], ["another one with a long name"], "seconds of sides"))
    lines = [line for line in screen.getvalue().splitlines() if line.startswith("|")]
    assert len(lines) == 4
    assert [cell.strip() for cell in lines[-2].split("|")[1:4]] == ["a side with a long name", "1.0", "2.00x"]


def test_several_values_are_read_from_one_text() -> None:
    options = PeersOptions(parts="limit, decode", branches="15,1,15")  # type: ignore[arg-type]
    assert (options.parts, options.branches) == (("limit", "decode"), (1, 15))


def test_a_resumed_run_knows_what_its_cells_took(bench: Any, paced: Any, log: Any) -> None:
    slow = paced("slow", lambda samples: 20.0 * samples)
    compare(bench(), slow, columns=(1, 4), patience=60.0)
    log.clear()
    results = compare(bench(), slow, columns=(1, 4), rounds=3, patience=60.0)
    assert log == [("slow", 1), ("slow", 1)]  # the other column takes 80 s, which was seen before
    assert len(results.cells) == 4
