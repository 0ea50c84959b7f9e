"""How many answers stay the same, from scripted texts."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tot.bench.peers.answers import answers, same
from tot.decoders import Request
from tot.named import load_task


class Writes:
    """A side that answers each question with a text of its own, and keeps what it was asked."""

    def __init__(self, name: str, *texts: str) -> None:
        self.name = name
        self.asked: list[Request] = []
        self.decoder = SimpleNamespace(generate=lambda asked: self._write(asked, texts))

    def _write(self, asked: list[Request], texts: tuple[str, ...]) -> list[Any]:
        self.asked += asked
        return [SimpleNamespace(text=text) for text in texts]


def test_numbers_count_however_they_are_written() -> None:
    ours = Writes("tot", " 1,200.", " 7", "no idea", " 5")
    other = Writes("tot, int8", " 1200", " 8", "none", " 5.0")
    goals = same(ours, [other], load_task("gsm8k"), ["a", "b", "c", "d"], lambda text: None)  # type: ignore[arg-type, list-item]
    assert [goal.measured for goal in goals] == ["3 of 4", "3 of 4"]
    assert goals[0].ratio == pytest.approx(0.75)
    assert goals[0].verdict == "MISSED"
    assert goals[0].what == "the same greedy answers, at once: tot, int8 / tot"


@pytest.mark.parametrize(("way", "ends"), [("at once", "Question: why?\nThe answer is"), ("worked out", "why?\n")])
def test_it_asks_greedily_after_worked_examples(way: str, ends: str) -> None:
    side = Writes("tot", " 4")
    assert answers(side, load_task("gsm8k"), ["why?"], way) == ["4"]  # type: ignore[arg-type]
    (request,) = side.asked
    assert isinstance(request.prompt, str)
    assert request.prompt.endswith(ends)
    assert request.prompt.count("The answer is") >= 4
    assert request.sampling.temperature == 0
