"""Trials by the clock: on scripted times the faster way is kept, and found out again when it changes."""

from __future__ import annotations

import pytest

from tot.decoders.drafting.trial import Trial


def run(trial: Trial, steps: int, drafting: float, plain: float, tokens: float = 2.0) -> int:
    """Steps with drafts out of so many, which take `drafting` seconds for `tokens` tokens, others `plain` for one."""
    drafted = 0
    for _ in range(steps):
        drafted += trial.drafts
        trial.step(*((tokens, drafting) if trial.drafts else (1.0, plain)))
    return drafted


@pytest.mark.parametrize(("drafting", "plain", "least", "most"), [(1.2, 1.0, 1900, 2000), (2.5, 1.0, 0, 100)])
def test_the_faster_way_is_kept(drafting: float, plain: float, least: int, most: int) -> None:
    assert least <= run(Trial(plain), 2000, drafting, plain) <= most


def test_what_clearly_pays_is_not_left_out_first() -> None:
    assert run(Trial(1.0), 60, drafting=1.0, plain=1.0) == 60


@pytest.mark.parametrize("thought", [0.01, 100.0])
def test_a_wrong_measurement_of_plain_steps_is_found_out(thought: float) -> None:
    trial = Trial(thought)
    run(trial, 300, drafting=1.2, plain=1.0)
    assert run(trial, 1000, drafting=1.2, plain=1.0) > 950


@pytest.mark.parametrize("worse", [True, False])
def test_a_change_is_noticed(worse: bool) -> None:
    trial = Trial(1.0)
    times = [2.5, 1.2] if not worse else [1.2, 2.5]
    run(trial, 3000, times[0], 1.0)
    run(trial, 3000, times[1], 1.0)
    late = run(trial, 1000, times[1], 1.0)
    assert late < 50 if worse else late > 950


def test_a_step_that_was_interrupted_decides_nothing() -> None:
    trial = Trial(1.0)
    run(trial, 500, drafting=1.2, plain=1.0)
    trial.step(2.0, 1000.0)
    assert run(trial, 2000, drafting=1.2, plain=1.0) > 1900


def test_the_first_step_after_a_change_counts_for_nothing() -> None:
    trial = Trial(1.0)
    trial.step(0.0, 1000.0)
    assert run(trial, 60, drafting=1.2, plain=1.0) == 60
