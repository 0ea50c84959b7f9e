"""The text that makes a search, generator or evaluator object."""

from __future__ import annotations

import pytest

from tot import BFS, MCTS, Combine, Prior, Sample
from tot.registry import spec_of


def test_a_temperature_that_was_given_is_in_the_text_even_if_it_is_the_default() -> None:
    assert spec_of(Sample(temperature=0.7)) == "sample:temperature=0.7"
    assert spec_of(Sample()) == "sample"


class Own(BFS):
    """A search without a name."""


COMBINED = Combine(evaluators=(Prior(),), weights=(1.0,))


@pytest.mark.parametrize("part", [Own(thoughts=2), COMBINED, MCTS(fast=COMBINED)])
def test_an_object_that_no_text_can_make_has_no_text(part: BFS | Combine | MCTS) -> None:
    assert spec_of(part) is None
