"""`tot bench gpu`: what it writes, when, and what it does about time, failures and options."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from tot.bench.gpu import run as bench
from tot.bench.gpu.gauge import Gauge
from tot.bench.gpu.run import Clock, Options, Record, measure, run
from tot.bench.gpu.sides import Amounts, Bench, Stages, compared
from tot.bench.peers.side import Work
from tot.bench.peers.turns import Results
from tot.cli.app import main

AMOUNTS = Amounts(branches=(1, 4), new_tokens=8, rounds=1, acceptance=0.5)


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture
def record(tmp_path: Path) -> Record:
    numbers: dict[str, Any] = {"models": {"tiny": {}}, "left_out": {}, "failed": {}}
    return Record(tmp_path / "numbers.json", Gauge(torch.device("cpu")), Console(quiet=True), numbers)


@pytest.fixture
def tiny_bench(record: Record) -> Bench:
    return Bench.open("tiny", torch.device("cpu"), AMOUNTS, record.gauge, record.say)


@pytest.fixture
def time() -> list[float]:
    """What the clock says, in seconds."""
    return [0.0]


@pytest.fixture
def lasting(time: list[float], monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[str]]:
    """Makes the parts those of given stages' seconds: lasting(a=[1, 5]). Gives a log of what they did."""

    def put(**parts: list[float]) -> list[str]:
        log: list[str] = []

        def part(name: str, bench: Bench) -> Stages:
            try:
                for i, seconds in enumerate(parts[name]):
                    if i:
                        yield {"stages": i}
                    time[0] += seconds
                    log.append(f"{name} {i}")
                return {"stages": len(parts[name])}
            finally:
                log.append(f"{name} closed")

        monkeypatch.setattr(bench, "PARTS", {name: lambda b, name=name: part(name, b) for name in parts})
        return log

    return put


def test_every_part_is_measured_and_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "numbers.json"
    options = ["--new-tokens", "8", "--branches", "4,1", "--rounds", "1", "--minutes", "30", "--acceptance", "0.5"]
    assert main(["bench", "gpu", "--shapes", "tiny", "--device", "cpu", *options, "--out", str(out)]) == 0
    numbers = json.loads(out.read_text())
    assert (numbers["failed"], numbers["left_out"], numbers["gpu"]["missing"]) == ({}, {}, "cpu is no GPU")
    parts = numbers["models"]["tiny"]
    assert list(parts) == ["limits", "packed", "pdos", "seed", "figure_2", "caps"]
    assert parts["limits"]["weight_bytes"] < 10**6 < parts["limits"]["read_bandwidth"]
    assert parts["packed"]["rounds"]["generate"]["4"]["0"]["tokens"] == 4 * 8
    assert parts["packed"]["ratio"]["tot / generate"].keys() == {"1", "4"}
    assert parts["pdos"]["tokens_drawn"] >= 10 * 4
    assert parts["pdos"]["inside_the_block"]["ratio"] > 1
    assert parts["seed"]["rounds"].keys() == {"seed, adapted", "seed, packed", "seed, rounds", "ar"}
    assert 0 < parts["seed"]["drafts"]["seed, packed"]["15"]["acceptance"] < 1
    assert parts["seed"]["acceptance_stated"] == 0.5
    assert [len(parts["figure_2"][f"prompt of {length}"]["seconds"]) for length in (24, 32, 40)] == [20] * 3
    assert parts["caps"]["caps"] == [0, 2, 4, 8, 12, 16]
    assert parts["caps"]["medians"].keys() == {"ar", "0", "2", "4", "8", "12", "16"}
    printed = capsys.readouterr().out
    assert "tot / generate" in printed
    assert "10 parallel steps: ar / pdos " in printed


def test_without_time_everything_is_named_as_left_out(tmp_path: Path) -> None:
    out = tmp_path / "numbers.json"
    run(Options(out, ("tiny",), device="cpu", minutes=0.0, amounts=AMOUNTS), Console(quiet=True))
    numbers = json.loads(out.read_text())
    assert numbers["models"] == {"tiny": {}}
    assert set(numbers["left_out"]) == {f"tiny, {part}" for part in bench.PARTS}
    assert set(numbers["left_out"].values()) == {"no time was left"}


def test_a_part_is_stopped_before_a_stage_that_does_not_fit_and_gives_back_what_it_holds(
    lasting: Any, time: list[float], record: Record, tiny_bench: Bench
) -> None:
    log = lasting(first=[1, 4, 4, 4], second=[1, 1])
    measure(tiny_bench, ["first", "second"], Clock(12.0, lambda: time[0]), record)
    assert log == ["first 0", "first 1", "first 2", "first closed", "second 0", "second 1", "second closed"]
    assert record.numbers["left_out"] == {"tiny, first": "its last rounds: no time was left"}
    stages = {name: part["stages"] for name, part in record.numbers["models"]["tiny"].items()}
    assert stages == {"first": 3, "second": 2}


def test_what_is_known_is_in_the_file_while_the_rest_is_measured(
    record: Record, tiny_bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []

    def part(bench: Bench) -> Stages:
        yield {"stages": 1}
        seen.append(json.loads(record.out.read_text())["models"]["tiny"]["part"])
        return {"stages": 2}

    monkeypatch.setattr(bench, "PARTS", {"part": part})
    measure(tiny_bench, ["part"], Clock(60.0), record)
    assert seen == [{"stages": 1}]
    assert json.loads(record.out.read_text())["models"]["tiny"]["part"]["stages"] == 2
    assert [path.name for path in record.out.parent.iterdir()] == ["numbers.json"]


def test_a_part_that_fails_is_named_keeps_what_it_knew_and_the_others_go_on(
    record: Record, tiny_bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    def bad(bench: Bench) -> Stages:
        yield {"stages": 1}
        raise torch.OutOfMemoryError("no room")

    def good(bench: Bench) -> Stages:
        yield {}
        return {"stages": 1}

    monkeypatch.setattr(bench, "PARTS", {"bad": bad, "good": good})
    measure(tiny_bench, ["bad", "good"], Clock(60.0), record)
    assert record.numbers["failed"] == {"tiny, bad": "OutOfMemoryError: no room"}
    assert {name: part["stages"] for name, part in record.numbers["models"]["tiny"].items()} == {"bad": 1, "good": 1}


def test_models_share_the_time_that_is_left() -> None:
    now = [0.0]
    clock = Clock(100.0, lambda: now[0])
    assert clock.share(2).left == 50.0
    now[0] = 30.0  # the first one took less
    assert clock.share(1).left == 70.0


def test_ratios_are_to_the_last_side_and_medians_of_rounds() -> None:
    class Seen:
        def __init__(self, name: str, percent: dict[int, list[int]]) -> None:
            self.name, self.percent = name, percent

    ours = {1: {0: Work(1.0, 8), 1: Work(2.0, 8), 2: Work(4.0, 8)}}
    theirs = {1: {0: Work(3.0, 8), 1: Work(8.0, 8), 2: Work(20.0, 8)}}
    results = Results((1, 4), {"ours": ours, "theirs": theirs}, failed={"theirs": "no room"})
    sides: Any = [Seen("ours", {1: [20, 40], 4: []}), Seen("theirs", {})]
    found = compared(results, sides)
    assert found["tokens_per_second"] == {"ours": {1: 4.0}, "theirs": {1: 1.0}}
    assert found["ratio"] == {"ours / theirs": {1: 4.0}}
    assert found["gpu_percent"] == {"ours": {1: 30.0}, "theirs": {}}
    assert found["failed"] == {"theirs": "no room"}


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--device", "cuda"], "torch finds no CUDA device here: run this on a GPU, or try it with --shapes tiny"),
        (["--device", "cpu"], "llama-2-7b would take hours on a CPU: give --shapes tiny"),
        (["--shapes", "tinny", "--device", "cpu"], "unknown shape 'tinny' (did you mean tiny?)"),
        (["--shapes", "tiny", "--parts", "packd", "--device", "cpu"], "unknown part 'packd' (did you mean packed?)"),
        (["--branches", "0,4"], "--branches '0,4' can't be read: write numbers from 1 on, such as 1,16"),
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
