"""What is judged, from scripted times."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest
from rich.console import Console

from tot.bench.peers import tables
from tot.bench.peers.goals import Goal, decode_goals, tree_goals
from tot.bench.peers.side import Work
from tot.bench.peers.turns import Results


@pytest.fixture
def results() -> Callable[[Mapping[str, Mapping[int, list[float]]]], Results]:
    """From seconds by side, column and round; every cell drew 100 tokens."""

    def make(seconds: Mapping[str, Mapping[int, list[float]]]) -> Results:
        works = {
            side: {column: {turn: Work(s, 100) for turn, s in enumerate(taken)} for column, taken in row.items()}
            for side, row in seconds.items()
        }
        return Results(sorted({column for row in seconds.values() for column in row}), works)

    return make


def test_a_goal_is_reached_by_the_median_of_the_rounds() -> None:
    assert Goal("x", "", [1.0, 2.0, 9.0], 2.0).verdict == "reached"
    assert Goal("x", "", [1.0, 1.9, 9.0], 2.0).verdict == "MISSED"
    assert Goal("x", "", [], 2.0).verdict == "not measured"
    assert Goal("x", "", [0.344], 0.3, share=True).shown(0.344) == "34%"


def test_llama_is_judged_by_its_best_precision(results: Callable[..., Results]) -> None:
    found = results(
        {
            "tot": {15: [1.0, 1.0]},
            "llama.cpp, BF16": {15: [3.0, 3.0]},
            "llama.cpp, Q8_0": {15: [1.5, 1.7]},
            "generate, batched": {15: [16.0, 18.0]},
        }
    )
    goals = {goal.what: goal for goal in decode_goals(found)}
    llama = goals["decode, 15: tot / llama.cpp, Q8_0, tokens/s"]
    assert llama.ratio == pytest.approx(1.6)
    assert llama.verdict == "MISSED"
    assert llama.measured == "100.0 (100.0 to 100.0) / 62.7 (58.8 to 66.7)"
    assert goals["decode, 15: tot / generate, batched, tokens/s"].verdict == "reached"
    assert goals["decode, 15: tot / vLLM, tokens/s"].verdict == "not measured"


def test_int8_is_judged_up_to_eight_branches(results: Callable[..., Results]) -> None:
    found = results({"tot": {1: [1.4], 8: [1.2], 15: [1.0]}, "tot, int8": {1: [1.0], 8: [1.0], 15: [1.0]}})
    judged = {goal.what: goal.verdict for goal in decode_goals(found) if "int8" in goal.what}
    assert judged == {
        "decode, 1: tot, int8 / tot, tokens/s": "reached",
        "decode, 8: tot, int8 / tot, tokens/s": "MISSED",
    }


def test_searches_are_judged_by_seconds_and_by_the_number_of_thoughts(results: Callable[..., Results]) -> None:
    found = results({"tot": {3: [2.0, 4.0], 5: [3.0]}, "vLLM": {3: [3.2, 6.4], 5: [5.4]}})
    judged = {goal.what: (goal.ratio, goal.verdict) for goal in tree_goals(found) if "vLLM" in goal.what}
    assert judged == {
        "tree, n = 3: vLLM / tot, s": (pytest.approx(1.6), "reached"),
        "tree, n = 5: vLLM / tot, s": (pytest.approx(1.8), "MISSED"),
    }


def test_a_row_says_what_was_done_once_skipped_and_not_asked(results: Callable[..., Results]) -> None:
    found = results({"a": {1: [1.0, 2.0], 3: [4.0]}, "b": {15: [1.0], 32: [1.0]}})
    found.skipped["a"] = {15: 130.0}
    found.failed["c"] = "it died"
    assert tables.cells(found, "a", 2, False) == ["75.0 (50.0 to 100.0)", "25.0, 1 of 2", "(over 130 s)", ""]
    assert tables.cells(found, "a", 2, True) == ["1.5 (1.0 to 2.0)", "4.0, 1 of 2", "(over 130 s)", ""]
    assert tables.cells(found, "c", 2, False) == ["failed"] * 4


def test_markdown_has_a_row_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    goals = [Goal("decode, 15: a side with a long name / another one with a long name", "1 / 2", [2.5], 2.0)] * 2
    tables.show(Console(width=40, highlight=False), tables.of_goals(goals), markdown=True)
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("|")]
    assert len(rows) == 4
    assert [cell.strip() for cell in rows[-1].split("|")[3:6]] == ["2.50x", "2.00x", "reached"]
