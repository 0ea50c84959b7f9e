"""Metrics against values computed by hand, the paired bootstrap against known cases, and comparisons of evaluations."""

from __future__ import annotations

import io
import json
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from rich.console import Console
from scipy.stats import binomtest

from tot.decoders import TotError
from tot.evaluation.compare import compare, table
from tot.evaluation.estimate import Estimate, bootstrap, estimate, paired
from tot.evaluation.progress import Progress
from tot.evaluation.results import summarise


def sample(index: int, score: float, tokens: int, repeat: int = 0, **other: Any) -> dict[str, Any]:
    """Make a line of samples.jsonl; the tokens are generated, except 10 for the answer."""
    measured = {"seconds": tokens / 100, "forwards": 3, "drafted": 8, "accepted": 2, "reached": 4}
    usage = {
        "generate": {"calls": 4, "prompt_tokens": 100, "new_tokens": tokens - 10},
        "answer": {"calls": 1, "prompt_tokens": 50, "new_tokens": 10},
    }
    return {
        "id": f"{index}-{repeat}",
        "index": index,
        "repeat": repeat,
        "question": f"what is {index}?",  # language: ok
        "score": score,
        "solved": score == 1,
        "parse_failure": False,
        "unreadable": 1,
        "thoughts": 6,
        "error": None,
        "usage": usage,
        "measured": measured,
        **other,
    }


# -- one evaluation ---------------------------------------------------------------------------------------------


def test_sums_are_over_samples_and_the_score_is_over_problems() -> None:
    lines = [sample(0, 1.0, 100), sample(0, 0.0, 30, 1), sample(1, 0.0, 50, parse_failure=True)]
    lines += [sample(1, 0.0, 60, 1, error="ValueError: x"), sample(2, 1.0, 40), sample(2, 1.0, 500, 1)]
    results = summarise(lines, bad_rows=2)
    assert (results.questions, results.samples, results.solved, results.errors, results.bad_rows) == (3, 6, 3, 1, 2)
    assert results.score.mean == pytest.approx((0.5 + 0 + 1) / 3)
    assert results.any.mean == pytest.approx(2 / 3)
    assert results.parse_failures.mean == pytest.approx(1 / 6)
    assert (results.tokens, results.prompt_tokens, results.forwards, results.unreadable) == (780, 900, 18, 6)
    assert results.seconds == pytest.approx(7.8)
    assert results.acceptance_rate == 0.5
    assert results.thoughts == 36
    assert results.by_purpose == {
        "generate": {"calls": 24, "prompt_tokens": 600, "new_tokens": 720},
        "answer": {"calls": 6, "prompt_tokens": 300, "new_tokens": 60},
    }


def test_if_every_search_failed_the_score_is_missing() -> None:
    failed = [sample(i, 0.0, 40, error="ValueError: x") for i in range(2)]
    results = summarise(failed)
    assert (results.score, results.any, results.errors) == (None, None, 2)
    assert results.score_text == "none: every search failed"
    assert results.to_json()["score"] is None
    some = summarise([*failed, sample(2, 0.0, 40)])
    assert some.score_text == "0.0% (0.0% to 56.1%)"


@pytest.mark.parametrize(("right", "n"), [(0, 10), (3, 10), (50, 50), (17, 400)])
def test_a_proportion_has_wilsons_interval(right: int, n: int) -> None:
    expected = binomtest(right, n).proportion_ci(method="wilson")
    result = estimate([1.0] * right + [0.0] * (n - right))
    assert (result.mean, result.low, result.high) == pytest.approx((right / n, expected.low, expected.high), abs=1e-6)


@pytest.mark.parametrize(
    ("result", "expected"),
    [
        (bootstrap([3.0]), "3.0 (one value)"),
        (bootstrap([2.5, 2.5, 2.5]), "2.5 (all equal)"),
        (bootstrap([1.0, 4.0]), "2.5 (-16.6 to 21.6)"),  # Student's t of one degree of freedom is 12.71
        (bootstrap([1.0, 2.0, 3.0]), "2.0 (-0.5 to 4.5)"),
        (bootstrap([*range(9)]), "4.0 (1.9 to 6.1)"),
    ],
)
def test_few_values_have_students_interval(result: Estimate, expected: str) -> None:
    assert result.format(".1f") == expected


@pytest.mark.parametrize("scores", [[1.0], [0.0, 0.0], [0.5, 0.5, 0.5], [0.25] * 50, [0.2, 0.4, 0.6]])
def test_few_or_equal_scores_have_a_wide_interval_within_the_scale(scores: list[float]) -> None:
    result = estimate(scores)
    assert 0 <= result.low <= result.mean <= result.high <= 1
    expected = binomtest(50 * len(scores), 100 * len(scores)).proportion_ci(method="wilson")
    assert result.high - result.low > 2 * (expected.high - 0.5)


@pytest.mark.parametrize(
    ("differences", "expected"),
    [
        ([0.0], "+0.0% (-92.4% to +92.4%)"),
        ([0.0, 0.0, 0.0], "+0.0% (-55.4% to +55.4%)"),
        ([1.0, 1.0, 1.0], "+100.0% (-10.1% to +100.0%)"),
        ([0.0] * 98, "+0.0% (-2.8% to +2.8%)"),
    ],
)
def test_few_or_equal_differences_have_bonett_and_prices_interval(differences: list[float], expected: str) -> None:
    """A variance of 2 / (n + 2) for equal scores: 1.96 * sqrt(2 / 3 / 3) = 0.924 for one pair."""
    assert paired(differences).format("+.1%") == expected


def test_progress_reports_the_score_once_a_search_succeeded_and_the_rate(monkeypatch: Any) -> None:
    now = 100.0
    monkeypatch.setattr("tot.evaluation.progress.time.monotonic", lambda: now)
    progress = Progress(4)
    assert progress.line == "loading the model … 0 s"
    progress.recall(sample(0, 0.0, 100, error="ValueError: x"))
    assert progress.line == "0 tokens/s"
    now = 110.0
    progress.finish(sample(1, 1.0, 400), None)
    assert progress.line == "score 50.0% (9.5% to 90.5%), 40 tokens/s"
    search = type("Search", (), {"meter": SimpleNamespace(new_tokens=100)})()
    progress.running.add(search)
    assert progress.line == "score 50.0% (9.5% to 90.5%), 50 tokens/s"
    progress.finish(sample(2, 0.0, 100), search)
    assert (progress.done, progress.running) == (2, set())


def test_warnings_are_printed_as_text_and_limited_in_number(capfd: Any) -> None:
    with Progress(1) as progress:
        for number in range(30):
            progress.warn(f"[red]row[/red] {number}\x1b[2J\n:smile: " + "x" * 200)
    lines = capfd.readouterr().err.splitlines()
    assert lines[9] == "[red]row[/red] 9�[2J :smile: " + "x" * 200
    assert lines[10:] == ["further warnings are in log.txt"]


# -- comparison -------------------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path) -> Any:
    """Write the folder of an evaluation: folder("a", samples, task="gsm8k")."""

    def write(name: str, samples: list[dict[str, Any]], task: str = "gsm8k") -> Path:
        path = tmp_path / name
        path.mkdir()
        (path / "config.yaml").write_text(yaml.safe_dump({"format": "tot.evaluation", "version": 1, "task": task}))
        (path / "samples.jsonl").write_text("".join(json.dumps(one) + "\n" for one in samples))
        return path

    return write


def test_paired_intervals_separate_sides_with_overlapping_means(folder: Any) -> None:
    """Scores cover the whole scale, and every problem is slightly better: unpaired intervals would overlap."""
    chance = random.Random(1)
    scores = [chance.uniform(0.1, 0.8) for _ in range(60)]
    a = folder("a", [sample(i, score, 100 + i) for i, score in enumerate(scores)])
    b = folder("b", [sample(i, score + 0.05 + 0.01 * (i % 2), 50 + i) for i, score in enumerate(scores)])
    common, (first, second) = compare([a, b])
    assert (list(common.values()), first.differences) == (scores, {})
    assert first.means["score"].high > second.means["score"].low
    gain = second.differences["score"]
    assert (gain.mean, gain.low, gain.high) == pytest.approx((0.055, 0.0537, 0.0563), abs=2e-4)
    assert second.differences["tokens"] == Estimate(-50.0, -50.0, -50.0)
    assert second.differences["latency"].mean == pytest.approx(-0.5)


def test_only_common_problems_count_and_repeats_are_averaged(folder: Any) -> None:
    a = folder("a", [sample(0, 1.0, 20), sample(1, 0.0, 20), sample(2, 1.0, 20)])
    b = folder("b", [sample(2, 1.0, 40), sample(2, 0.0, 20, 1), sample(1, 1.0, 30), sample(7, 0.0, 99)])
    common, (first, second) = compare([a, b])
    assert common == {"what is 1?": 0.0, "what is 2?": 1.0}  # language: ok
    assert (first.means["score"].mean, second.means["score"].mean) == (0.5, 0.75)
    assert second.differences["score"].mean == 0.25
    assert second.means["tokens"].mean == 30


def test_the_table_has_each_side(folder: Any) -> None:
    a = folder("a", [sample(i, i % 2, 20) for i in range(4)])
    b = folder("b", [sample(i, 1.0, 30) for i in range(4)])
    sides = compare([a, b])[1]
    console = Console(file=io.StringIO(), width=200)
    console.print(table(sides))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    for cell in ("50.0% (15.0% to 85.0%)", "+50.0% (-26.3% to +93.0%)", "30 (all equal) │ +10 (all equal)"):
        assert cell in text


def test_incomparable_folders_are_rejected(folder: Any, tmp_path: Path) -> None:
    a, other = folder("a", [sample(0, 1.0, 20)]), folder("other", [sample(1, 1.0, 20)])
    game = folder("game", [sample(0, 1.0, 20)], task="game24")
    damaged = folder("damaged", [{"question": "what is 0?"}])  # language: ok
    failed = folder("failed", [sample(0, 0.0, 20, error="ValueError: x")])
    for folders, message in (
        ([], "name two folders or more"),
        ([a, game], r"a has task gsm8k, but .*game has game24: compare runs of one task"),
        ([a, other], r"have no question in common"),
        ([a, tmp_path], r"is not the folder of an evaluation: it has no config\.yaml"),
        ([a, damaged], r"samples\.jsonl, line 1 is damaged: delete that line"),
        ([a, failed], r"failed has no score, because every search failed: see its log\.txt"),
    ):
        with pytest.raises(TotError, match=message):
            compare(folders)
