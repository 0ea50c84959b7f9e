"""The benchmarks run, with both sides in one table, on as little as they can be given."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tot.cli import main


@pytest.fixture
def tot(capfd: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Runs the command line in this process; gives what it printed."""

    def run(*arguments: str) -> str:
        assert main(list(arguments)) == 0
        return capfd.readouterr().out

    return run


@pytest.mark.real
def test_decoders_are_compared_serial_and_packed_at_every_temperature(
    tot: Any, smollm2: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tot.bench.decoders.NEW", 4)
    monkeypatch.setattr("tot.bench.decoders.TASKS", ("gsm8k",))
    out = tmp_path / "numbers.json"
    options = ("--decoders", "sd", "--decoder-option", "k=2", "--rounds", "1", "--samples", "2")
    printed = tot("bench", "decoders", *options, "--temperatures", "0,1", "--out", str(out))
    assert re.findall(r"│ (\w+, \w+(?: at a time)?) ", printed) == 2 * [
        "ar, one at a time",
        "ar, packed",
        "sd, one at a time",
        "sd, packed",
    ]
    numbers = json.loads(out.read_text())
    assert numbers["ar, packed, T=0.0"]["ratios"][1] == 1
    assert all(speed > 0 for name, side in numbers.items() if name != "machine" for speed in side["speeds"])


@pytest.mark.real
def test_searches_are_compared_with_chance_on_the_same_instances(tot: Any, smollm2: str, data: Path) -> None:
    instances = ("--data", str(data / "blocksworld_dev.jsonl"), "--steps", "2", "--count", "2")
    printed = tot("bench", "planning", *instances, "--nodes", "4", "--seeds", "1")
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in printed.splitlines() if line.startswith("│")]
    assert len(rows) == 7
    assert [row[0] == "the same, by chance" for row in rows] == [False, False, True, False, True, False, True]
    assert all(re.fullmatch(r"\d+%", row[1]) for row in rows)
    assert all((float(row[-2]) == 0) == (row[0] == "the same, by chance") for row in rows)
