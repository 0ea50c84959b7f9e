"""`tot bench gpu`: what it writes, and what it does about time, failures and options."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from tot.bench import gpu
from tot.bench.gpu import Gauge, Model, Options, run
from tot.bench.harness import Side
from tot.cli.app import main

pytestmark = pytest.mark.benches


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def test_every_part_is_measured_and_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "numbers.json"
    options = ["--new-tokens", "8", "--branches", "4,1", "--rounds", "1", "--minutes", "30"]
    assert main(["bench", "gpu", "--shapes", "tiny", "--device", "cpu", *options, "--out", str(out)]) == 0
    numbers = json.loads(out.read_text())
    printed = capsys.readouterr().out
    assert numbers["finished"]
    assert "left out" not in numbers
    parts = {name.removeprefix("tiny: "): found for name, found in numbers.items() if name.startswith("tiny: ")}
    cells: dict[str, Any] = {name: part["cells"] for name, part in parts.items() if "cells" in part}
    assert parts["limits"]["weight_bytes"] < 10**6 < parts["limits"]["read_bandwidth"]
    packed = cells["new tokens/s, samples of one prompt at T = 1"]
    assert [(cell["side"], cell["column"], cell["tokens"]) for cell in packed] == [
        ("tot", 1, 8),
        ("generate", 1, 8),
        ("tot", 4, 32),
        ("generate", 4, 32),
    ]
    assert "tot / generate" in printed
    (pdos,) = (found for name, found in cells.items() if name.startswith("10 parallel steps"))
    assert {cell["side"]: cell["inside"] is not None for cell in pdos} == {
        "pdos": True,
        "ar": False,
    }
    (seed,) = (found for name, found in cells.items() if "drafts of 4" in name)
    assert {cell["side"] for cell in seed} == {"seed, adapted", "seed, packed", "seed, rounds", "ar"}
    assert 0 < statistics.fmean(cell["acceptance"] for cell in seed if cell["side"] == "seed, packed") < 1
    assert [len(parts["figure 2"][f"prompt of {length}"]) for length in (24, 32, 40)] == [20] * 3
    (cut,) = (found for name, found in cells.items() if name.startswith("a rationale of 16"))
    assert [cell["side"] for cell in cut] == ["ar", *(f"cap {cap}" for cap in (0, 2, 4, 8, 12, 16))]


def test_without_time_everything_is_named_as_left_out(tmp_path: Path) -> None:
    out = tmp_path / "numbers.json"
    run(Options(("tiny",), device="cpu", minutes=0.0), out, Console(quiet=True))
    assert json.loads(out.read_text())["left out"] == {"tiny": "no time was left"}


def test_a_part_that_fails_is_named_and_the_others_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def bad(model: Model) -> None:
        raise torch.OutOfMemoryError("no room")

    def good(model: Model) -> None:
        model.bench.keep(good=model.name)

    monkeypatch.setattr(gpu, "PARTS", {"limits": bad, "packed": good})
    run(Options(("tiny",), ("limits", "packed"), "cpu"), tmp_path / "n.json", Console(quiet=True))
    numbers = json.loads((tmp_path / "n.json").read_text())
    assert numbers["left out"] == {"tiny, limits": "OutOfMemoryError: no room"}
    assert numbers["good"] == "tiny"


@pytest.fixture
def nvidia_smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Has torch find a GPU, and a program that tells of it."""

    def pretend(script: str) -> None:
        program = tmp_path / "nvidia-smi"
        program.write_text(f"#!/bin/sh\n{script}\n")
        program.chmod(0o755)
        monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
        monkeypatch.setattr("torch.cuda.is_available", lambda: True)
        monkeypatch.setattr("torch.cuda.current_device", lambda: 0)

    return pretend


def test_a_side_has_how_busy_the_gpu_was_in_its_own_time(nvidia_smi: Any, tmp_path: Path) -> None:
    asked = tmp_path / "asked"
    nvidia_smi(f'[ "$1" = --id=0 ] && echo 10; while [ ! -e {asked} ]; do sleep 0.01; done; echo 90; exec sleep 60')
    gauge = Gauge()
    with gauge.open():
        while not gauge.samples:
            pass

        def work(_: Any) -> dict[str, Any]:
            asked.touch()
            while len(gauge.samples) < 2:
                pass
            return {"seconds": 1.0}

        took = gauge.watched(Side("a", work)).run(None)
    assert took == {"seconds": 1.0, "gpu_percent": 90.0}
    assert [percent for _, percent in gauge.samples] == [10, 90]


def test_without_a_gpu_nothing_is_sampled() -> None:
    gauge = Gauge()
    with gauge.open():
        took = gauge.watched(Side("a", lambda _: {"seconds": 1.0})).run(None)
    assert took["gpu_percent"] is None


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--device", "cuda"], "torch finds no CUDA device here"),
        (["--device", "cpu"], "llama-2-7b would take hours on a CPU"),
        (["--shapes", "tinny", "--device", "cpu"], "unknown shape 'tinny'"),
        (["--shapes", "tiny", "--parts", "packd", "--device", "cpu"], "unknown part 'packd'"),
        (["--branches", "0,4"], "--branches '0,4' can't be read"),
    ],
)
def test_bad_options_are_refused_before_anything_is_made(
    options: list[str],
    said: str,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    out = tmp_path / "numbers.json"
    assert main(["bench", "gpu", *options, "--out", str(out)]) == 2
    assert said in " ".join(capfd.readouterr().err.split())
    assert not out.exists()
