"""Simulated schedules against closed forms, and `python -m benchmarks schedule`."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.__main__ import main
from benchmarks.schedule import Machine, Schedule, Wave, simulate
from tot.decoders.drafting.latency_model import LatencyModel

ROWS = LatencyModel((1, 11), (1.0, 2.0))
"""A tenth of a second for each further row."""
CHAIN = (1, 1, 1)


def flat(seconds: float) -> LatencyModel:
    return LatencyModel((1,), (seconds,))


def seconds(schedule: Schedule, machine: Machine, texts: int = 1, chance: float = 0.0, length: int = 300) -> float:
    return simulate(schedule, [Wave([length] * texts)], machine, chance)


@pytest.mark.parametrize(
    ("draft", "verify", "texts", "devices", "times"),
    [
        (1.0, 1.0, 1, 1, 1.0),  # no draft work to overlap
        (1.0, 1.0, 2, 1, 2.0),
        (0.3, 1.0, 3, 1, 1.3),  # the target never waits
        (2.0, 1.0, 3, 1, 1.5),  # the target waits for the draft
        (2.0, 1.0, 3, 3, 3.0),
        (4.0, 1.0, 3, 3, 3.0),  # few distinct texts
    ],
)
def test_the_gain_of_overlap(draft: float, verify: float, texts: int, devices: int, times: float) -> None:
    machine = Machine(flat(verify), flat(draft / 3), devices=devices)
    apart, beside = (seconds(Schedule("rounds", CHAIN, overlap=overlap), machine, texts) for overlap in (False, True))
    assert apart / beside == pytest.approx(times, rel=0.02)
    assert apart == seconds(Schedule("serial", CHAIN), machine, texts)
    assert seconds(Schedule("rounds", CHAIN, overlap=None), machine, texts) == beside


def test_rounds_lose_if_draft_and_target_slow_each_other_down() -> None:
    machine = Machine(flat(0.05), flat(0.02), worker=1.5, draft_beside=2.2, verify_beside=1.9)
    apart, beside = (seconds(Schedule("rounds", CHAIN, overlap=overlap), machine, 3) for overlap in (False, True))
    # The draft of 60 ms takes 132 ms beside the target, which is always at work, since it takes 95 ms of them.
    assert beside / apart == pytest.approx(0.12 / 0.11, rel=0.1)
    assert seconds(Schedule("rounds", CHAIN, overlap=None), machine, 3) == apart


def test_without_drafts_a_packed_step_takes_one_forward_of_all_texts() -> None:
    machine = Machine(ROWS, flat(9.0))
    assert seconds(Schedule("serial"), machine, 3, length=100) == pytest.approx(300 * 1.0)
    assert seconds(Schedule("packed"), machine, 3, length=100) == pytest.approx(100 * 1.2)
    assert simulate(Schedule("packed"), [Wave([10, 20])], machine, 0.0) == pytest.approx(10 * 1.1 + 10 * 1.0)


def test_accepted_drafts_save_forwards() -> None:
    machine = Machine(ROWS, flat(0.1))
    every = seconds(Schedule("serial", CHAIN), machine, chance=1.0, length=100)
    assert every == pytest.approx(25 * (1.3 + 0.3))
    some = seconds(Schedule("serial", CHAIN), machine, chance=0.5, length=30_000)
    assert some == pytest.approx(30_000 / (1 + 0.5 + 0.25 + 0.125) * (1.3 + 0.3), rel=0.02)


def test_a_tree_of_drafts_is_verified_in_all_its_rows() -> None:
    machine = Machine(ROWS, ROWS)
    every = seconds(Schedule("serial", (2, 2)), machine, chance=1.0, length=99)
    assert every == pytest.approx(33 * (ROWS.of(1 + 2 + 4) + ROWS.of(1) + ROWS.of(2)))


def test_an_adaptive_schedule_drafts_only_what_pays() -> None:
    machine = Machine(ROWS, flat(0.1))
    packed = Schedule("packed", CHAIN, adapt=True)
    assert seconds(packed, machine, 8, chance=0.0) == seconds(Schedule("packed"), machine, 8)
    assert seconds(packed, machine, 1, chance=0.9) < 0.7 * seconds(Schedule("packed"), machine, 1)
    slow = replace(machine, draft=flat(3.0))
    assert seconds(packed, slow, 1, chance=0.9) == seconds(Schedule("packed"), slow, 1)


def test_prompts_are_computed_by_target_and_draft() -> None:
    machine = Machine(LatencyModel((1, 64), (1.0, 64.0)), LatencyModel((1, 64), (0.5, 32.0)))
    prompt = [Wave([], 100)]
    assert simulate(Schedule("packed"), prompt, machine, 0.0) == pytest.approx(100)
    assert simulate(Schedule("packed", CHAIN), prompt, machine, 0.0) == pytest.approx(150)


@pytest.mark.benches
def test_the_map_of_schedules(tiny: Callable[..., Any], tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with tiny() as decoder:
        pass
    decoder.model.save_pretrained(tmp_path / "model")
    decoder.tokenizer.save_pretrained(tmp_path / "model")
    asked = ("--model", str(tmp_path / "model"), "--texts", "1,8", "--shares", "0.1", "--out", str(tmp_path / "n.json"))
    assert main(["schedule", *asked, "--draft", str(tmp_path / "model")]) == 0
    printed = capfd.readouterr().out
    assert printed.count("rounds, of packed seed") == 4 * 2  # machines, shares
    assert "a draft device per text, rows cost nothing" in printed
    measured = json.loads((tmp_path / "n.json").read_text())["forwards"]
    assert measured["target"]["seconds"][0] > 0 < measured["draft"]["seconds"][0]
    (tmp_path / "n.json").unlink()
    assert main(["schedule", *asked, "--draft", "lookup"]) == 2
    assert "'lookup' is no model" in capfd.readouterr().err
