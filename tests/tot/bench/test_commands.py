"""The benchmarks run, with both sides in one table, on as little as they can be given."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tot.cli.app import main

pytestmark = pytest.mark.benches


@pytest.fixture
def tot(capfd: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Runs the command line in this process; gives what it printed."""

    def run(*arguments: str) -> str:
        assert main(list(arguments)) == 0
        return capfd.readouterr().out

    return run


@pytest.mark.real
@pytest.mark.slow
def test_decoders_are_compared_serial_and_packed_at_every_temperature(
    tot: Any, smollm2: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tot.bench.decoders.NEW", 4)
    monkeypatch.setattr("tot.bench.decoders.TASKS", ("gsm8k",))
    out = tmp_path / "numbers.json"
    options = ("--decoders", "ar,sd,seed", "--decoder-option", "k=2", "--rounds", "1", "--samples", "2")
    printed = tot("bench", "decoders", *options, "--temperatures", "1", "--out", str(out))
    rows = [line.split("│")[1].strip() for line in printed.splitlines() if line.startswith("│")]
    assert rows[:8] == [
        "ar, serial",
        "ar, packed",
        "sd (1,1), serial",
        "sd (1,1), packed",
        "seed (1,1), rounds, no overlap",
        "seed (1,1), rounds",
        "seed (1,1), packed",
        "seed, packed",
    ]
    numbers = json.loads(out.read_text())
    cells = numbers["thoughts, T = 1.0"]["cells"]
    assert sorted(cell["side"] for cell in cells) == sorted(rows[:8])
    for cell in cells:
        assert cell["accepted"] <= cell["reached"] <= cell["drafted"]
        if cell["side"] != "seed, packed":  # which drafts where that pays, by the clock
            assert bool(cell["drafted"]) == (not cell["side"].startswith("ar"))
    assert "acceptance" in printed
    assert "of drafted" in printed
    (always,) = (c for c in numbers["purpose evaluate, T = 1"]["cells"] if c["side"] == "seed, always drafted whole")
    assert always["spent"]["verify"] > 0


def test_what_the_bench_compares_can_not_be_set(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["bench", "decoders", "--decoder-option", "policy=rounds", "--out", str(tmp_path / "n.json")]) == 2
    assert "policy is what is compared here" in capfd.readouterr().err


def test_an_option_that_no_decoder_has_is_refused(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    asked = ["bench", "decoders", "--decoders", "ar,sd", "--out", str(tmp_path / "n.json")]
    assert main([*asked, "--decoder-option", "kk=3"]) == 2
    assert "unknown option of ar, sd 'kk' (did you mean k?): choose one of draft, k" in capfd.readouterr().err


@pytest.mark.real
def test_evaluating_together_is_compared_with_one_at_a_time(tot: Any, smollm2: str, data: Path, tmp_path: Path) -> None:
    out = tmp_path / "numbers.json"
    options = ("--search", "cot", "--max-tokens", "8", "--limit", "2", "--concurrency", "2", "--out", str(out))
    printed = tot("bench", "eval", "--data", str(data / "gsm8k_test_0_400.jsonl"), *options)
    numbers = json.loads(out.read_text())
    one, both = numbers["2 gsm8k problems, search cot"]["cells"]
    assert (one["side"], both["side"]) == ("1 at once", "2 at once")
    assert one["tokens"] == both["tokens"] == 32  # of two solutions, and of two answers
    assert 0 < both["idle"] < 1
    assert f"{one['seconds'] / both['seconds']:.2f}x" in printed
