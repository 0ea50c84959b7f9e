"""The benchmark `neighbours`: each side runs idle and beside a busy program, which ends with its side."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import psutil
import pytest
from rich.console import Console

from benchmarks.options import NeighboursOptions
from benchmarks.peers import neighbours
from benchmarks.peers.neighbours import BUSY, busy_core, run

pytestmark = pytest.mark.benches


def test_a_busy_core_is_a_process_that_ends_with_the_block() -> None:
    before = set(psutil.Process().children())
    with busy_core():
        (program,) = set(psutil.Process().children()) - before
        assert program.is_running()
    assert not program.is_running()


def test_both_sides_run_idle_and_beside_a_busy_core(
    tiny: Any, paced: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("benchmarks.peers.sides.load_decoder", lambda name, model, **options: tiny())
    monkeypatch.setattr(neighbours, "mixed_ids", lambda *options: list(range(10, 60)))
    monkeypatch.setattr("benchmarks.peers.peers.BUSY", 1000.0)
    monkeypatch.setattr(neighbours, "open_llama", lambda *options: paced("llama.cpp", lambda samples: 1000.0))
    options = NeighboursOptions(branches=(1, 3), rounds=1, new_tokens=3, out=tmp_path / "n.json", markdown=True)
    run(options, Console(width=200, highlight=False))
    numbers = json.loads((tmp_path / "n.json").read_text())
    (cells,) = (found["cells"] for found in numbers.values() if isinstance(found, dict) and "cells" in found)
    names = ["tot", f"tot, {BUSY}", "llama.cpp", f"llama.cpp, {BUSY}"]
    assert sorted({cell["side"] for cell in cells}) == sorted(names)
    assert {cell["tokens"] for cell in cells if cell["column"] == 3} == {9}
    rows = [line.split("|")[1].strip() for line in capsys.readouterr().out.splitlines() if line.startswith("|")]
    assert rows[-2:] == [f"tot, {BUSY} / tot", f"llama.cpp, {BUSY} / llama.cpp"]


def test_without_llama_only_our_side_runs(
    tiny: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("benchmarks.peers.sides.load_decoder", lambda name, model, **options: tiny())
    monkeypatch.setattr(neighbours, "mixed_ids", lambda *options: list(range(10, 60)))
    monkeypatch.setattr("benchmarks.peers.peers.BUSY", 1000.0)
    options = NeighboursOptions(branches=(1,), rounds=1, new_tokens=2, llama=tmp_path / "none")
    run(options, Console(width=200, highlight=False))
    assert "llama.cpp is left out" in capsys.readouterr().out
