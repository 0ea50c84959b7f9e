"""How many answers stay the same, from scripted texts."""

from __future__ import annotations

from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import pytest

from tot.bench.peers.answers import answers, same
from tot.bench.peers.sides import Plan, open_exact
from tot.decoders import Request
from tot.registry import load_task


class Writes:
    """A side that answers each question with a text of its own, and keeps what it was asked. In other company it
    answers `instead`."""

    def __init__(self, name: str, texts: dict[str, str], instead: dict[str, str] | None = None) -> None:
        self.name = name
        self.asked: list[Request] = []
        self.texts, self.instead = texts, texts | (instead or {})
        self.decoder = SimpleNamespace(generate=self._write)

    def _write(self, asked: list[Request]) -> list[Any]:
        self.asked += asked
        questions = [str(request.prompt).rpartition("Question: ")[2].partition("\n")[0] for request in asked]
        texts = self.texts if questions == sorted(questions) else self.instead
        return [SimpleNamespace(text=texts[question]) for question in questions]


def test_numbers_count_however_they_are_written() -> None:
    ours = Writes("tot", {"a": " 1,200.", "b": " 7", "c": "no idea", "d": " 5"}, {"a": " 1", "d": " 4"})
    other = Writes("tot, int8", {"a": " 1200", "b": " 8", "c": "none", "d": " 5.0"})
    exact = Writes("tot, float32", {"a": " 1200", "b": " 7", "c": "", "d": " 5"})
    task, questions = load_task("gsm8k"), ["a", "b", "c", "d"]
    goals = same(ours, [other], task, questions, lambda text: None, [exact])  # type: ignore[arg-type, list-item]
    assert [goal.measured for goal in goals] == ["2 of 4", "4 of 4", "3 of 4"] * 2
    assert [goal.verdict for goal in goals] == ["", "", "MISSED"] * 2
    assert goals[0].what == "the same greedy answers, at once: tot, packed otherwise / tot"
    assert goals[2].what == "the same greedy answers, at once: tot, int8 / tot"
    assert goals[2].ratio == pytest.approx(0.75)


@pytest.mark.parametrize(("way", "ends"), [("at once", "Question: why?\nThe answer is"), ("worked out", "why?\n")])
def test_it_asks_greedily_after_worked_examples(way: str, ends: str) -> None:
    side = Writes("tot", {"why?": " 4"})
    assert answers(side, load_task("gsm8k"), ["why?"], way) == ["4"]  # type: ignore[arg-type]
    (request,) = side.asked
    assert isinstance(request.prompt, str)
    assert request.prompt.endswith(ends)
    assert request.prompt.count("The answer is") >= 4
    assert request.sampling.temperature == 0


def test_a_control_that_cannot_be_had_is_left_out() -> None:
    told: list[str] = []
    with ExitStack() as stack:
        assert open_exact(Plan(model="no/such-model-anywhere.gguf"), stack, told.append) == []
    assert len(told) == 1
    assert told[0].startswith("tot, float32 is left out: ")
