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
