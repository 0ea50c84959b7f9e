"""The benchmark `deadlines`: replays with times computed by hand."""

from __future__ import annotations

from collections.abc import Sequence
from decimal import Decimal

import pytest

from benchmarks.deadlines import Clock, Outcome, Question, Recorded, fixed, replay
from tot.registry import load_task, parts_of
from tot.search.auto import Auto
from tot.search.base import Resources
from tot.search.calibration import Calibration, Source
from tot.tree.thought import Thought

CLOCK = Clock(row_cost=0.5, prompt_steps=10)
CALIBRATION = Calibration(
    task=None,
    model=None,
    questions=1,
    none=0,
    sources={"chain": Source(weight=2, others=0, tokens=20)},
    gains=(0.1,),
)


def recorded(answer: str, tokens: int) -> Recorded:
    return Recorded(Thought(parts={"chain": f"The answer is {answer}."}), Decimal(answer), float(answer == "7"), tokens)


def question(greedy: Recorded, sampled: Sequence[Recorded]) -> Question:
    made = Question("How many?", "sums", {"chain": greedy})
    made.sampled["chain"] = list(sampled)
    return made


def at(one: Question, deadline: float, together: int = 1) -> Outcome:
    task = load_task("gsm8k").with_prompts("chat")
    auto = parts_of(task, Auto(solutions=("chain",), samples=3, until=1))["search"]
    return replay(auto, task, one, Resources(together, calibrations={"generate": CALIBRATION}), CLOCK, deadline)


def test_auto_takes_samples_one_after_another_until_the_deadline() -> None:
    one = question(recorded("8", 20), [recorded("7", 30), recorded("7", 10)])
    found = [at(one, deadline) for deadline in (29, 30, 75, 90, 200)]
    assert [(out.right, out.time, out.tokens) for out in found] == [
        (0, 29, 19),  # the prompt takes 10 steps
        (0, 30, 20),
        (0, 75, 50),  # the second sample ends at 70, and the third is in its prompt: a tie, which the first wins
        (1, 90, 60),
        (1, 90, 60),
    ]
    assert found[-1].certainty == pytest.approx(9 / (9 + 4 + 1))


def test_samples_together_take_longer_steps() -> None:
    one = question(recorded("8", 20), [recorded("7", 30)])
    assert at(one, 45, together=2).time == 45  # 30 steps of two samples
    both = at(one, 100, together=2)
    assert (both.time, both.tokens) == (55, 50)  # and 10 steps of one


def test_fixed_votes_count_the_samples_that_end_before_the_deadline() -> None:
    one = question(recorded("8", 20), [recorded("7", 30), recorded("9", 10), recorded("7", 40)])
    three = [("chain", False, 3)]
    assert fixed(three, one, CLOCK, 1000) == Outcome(1.0, 40 + 30 + 10, 80)  # 20 steps of 3 at 2, 20 of 2, 10 of 1
    early = fixed(three, one, CLOCK, 40)
    assert (early.right, early.time, early.tokens) == (0.0, 40, 30)  # only 9 has ended
