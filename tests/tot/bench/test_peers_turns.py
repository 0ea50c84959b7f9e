"""Who is asked what, in which order, and what is made of the times."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from tot.bench.peers.side import Work, branches
from tot.bench.peers.turns import Results, Turns
from tot.bench.peers.waves import Wave


def asking(count: int, turn: int) -> Sequence[Wave]:
    return branches([turn, 1, 2], count, 4)


@pytest.fixture
def turns() -> Callable[..., Turns]:
    def make(*sides: Any, columns: Sequence[int] = (1, 4), patience: float = 60.0) -> Turns:
        return Turns(sides, columns, patience, lambda text: None, settle=lambda: None)

    return make


def test_sides_take_turns_and_another_is_first_every_round(turns: Any, paced: Any, log: Any) -> None:
    bench = turns(paced("a", lambda samples: 1.0), paced("b", lambda samples: 1.0))
    bench.round(0, asking)
    bench.round(1, asking)
    assert log == [("a", 1), ("b", 1), ("a", 4), ("b", 4), ("b", 1), ("a", 1), ("b", 4), ("a", 4)]


def test_warm_ups_are_run_and_not_counted(turns: Any, paced: Any, log: Any) -> None:
    bench = turns(paced("a", lambda samples: 1.0))
    bench.warm_up(asking)
    assert log == [("a", 1), ("a", 4)]
    assert bench.results.works == {}


def test_a_warm_up_that_would_take_long_is_left_out(turns: Any, paced: Any, log: Any) -> None:
    bench = turns(paced("slow", lambda samples: 10.0 * samples), columns=(1, 2), patience=60.0)
    bench.warm_up(asking)
    assert log == [("slow", 1)]  # 20 s are more than a quarter of a minute


def test_what_takes_longer_than_the_patience_is_done_in_the_first_round_only(turns: Any, paced: Any, log: Any) -> None:
    bench = turns(paced("slow", lambda samples: 20.0 * samples), columns=(1, 4), patience=60.0)
    for turn in range(3):
        bench.round(turn, asking)
    assert log == [("slow", 1), ("slow", 4), ("slow", 1), ("slow", 1)]
    assert sorted(bench.results.of("slow", 4)) == [0]
    assert sorted(bench.results.of("slow", 1)) == [0, 1, 2]


def test_what_takes_three_times_the_patience_is_not_done_and_shown_so(turns: Any, paced: Any, log: Any) -> None:
    bench = turns(paced("slow", lambda samples: 20.0 * samples), columns=(1, 10), patience=60.0)
    bench.round(0, asking)
    assert log == [("slow", 1)]
    assert bench.results.skipped == {"slow": {10: 200.0}}


def test_round_one_is_predicted_from_the_warm_up(turns: Any, paced: Any, log: Any) -> None:
    bench = turns(paced("slow", lambda samples: 10.0 * samples), columns=(1,), patience=60.0)
    bench.warm_up(lambda count, turn: branches([1, 2, 3], count, 4))  # 7 rows in 10 s
    bench.round(0, lambda count, turn: branches([1] * 10, count, 130))  # 140 rows
    assert log == [("slow", 1)]
    assert bench.results.skipped == {"slow": {1: 200.0}}


def test_a_side_is_not_asked_beyond_its_most(turns: Any, paced: Any, log: Any) -> None:
    bench = turns(paced("one", lambda samples: 1.0, most=1), paced("all", lambda samples: 1.0))
    bench.round(0, asking)
    assert log == [("one", 1), ("all", 1), ("all", 4)]


def test_a_side_that_fails_is_told_and_the_others_go_on(turns: Any, paced: Any, log: Any) -> None:
    def fail(samples: int) -> float:
        raise RuntimeError(f"no room for {samples}")

    bench = turns(paced("bad", fail), paced("good", lambda samples: 2.0))
    bench.round(0, asking)
    bench.round(1, asking)
    assert bench.results.failed == {"bad": "no room for 1"}
    assert [name for name, _ in log] == ["bad", "good", "good", "good", "good"]
    assert bench.results.rates("good", 4) == [8.0, 8.0]


def test_ratios_are_those_of_rounds_that_both_did() -> None:
    ours = {0: Work(1.0, 8), 1: Work(2.0, 8), 2: Work(4.0, 8)}
    theirs = {0: Work(3.0, 8), 2: Work(20.0, 8)}
    results = Results((4,), {"ours": {4: ours}, "theirs": {4: theirs}})
    assert results.ratios("ours", "theirs", 4) == [3.0, 5.0]
    assert results.ratios("ours", "nobody", 4) == []


def test_the_fastest_is_the_one_with_the_best_median() -> None:
    steady = {0: Work(2.0, 8), 1: Work(2.0, 8), 2: Work(2.0, 8)}
    lucky_once = {0: Work(0.1, 8), 1: Work(4.0, 8), 2: Work(4.0, 8)}
    results = Results((4,), {"a": {4: lucky_once}, "b": {4: steady}})
    assert results.fastest(["a", "b", "c"], 4) == "b"
    assert results.fastest(["c"], 4) is None
