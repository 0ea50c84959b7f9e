"""Sequential halving: rounds of equal size, whose revisions go to the better half of the drafts."""

from __future__ import annotations

from collections import Counter

import pytest

from tot import Expand, SequentialHalving, Task
from tot.decoders import OptionError
from tot.registry import SEARCHES, named


class Lines(Task):
    templates = {"thought": "", "value": "", "answer": ""}  # noqa: RUF012
    depth = 99


def revisions(drafts: int, iterations: int, gain: float = 0.0) -> tuple[Counter[str], float | None]:
    """Count the thoughts in the line of each draft. Draft n is worth n; a revision adds `gain`."""
    search = SequentialHalving(drafts=drafts, iterations=iterations).start(Lines(), "?")
    while (step := search.ask()) is not None:
        if isinstance(step, Expand):
            assert step.count is not None
            first = step.nodes[0].parent is None
            names = [f"{i}" if first else f"{len(search.tree)} {i}" for i in range(step.count)]
            search.tell([[f"{name} after {node.id}" if not first else name for name in names] for node in step.nodes])
        else:
            search.tell([float(state.thoughts[0].text) + gain * (len(state.thoughts) - 1) for state in step.states])
    state = search.tree.state
    lines = Counter(state(node).thoughts[0].text for node in search.tree if node.parent is not None)
    return lines, search.best.value


def test_the_better_half_gets_the_revisions_of_a_round() -> None:
    lines, best = revisions(8, 32)
    assert lines == {"7": 1 + 2 + 4 + 8, "6": 1 + 2 + 4, "5": 3, "4": 3, "3": 1, "2": 1, "1": 1, "0": 1}
    assert lines.total() == 32
    assert best == 7


def test_revisions_build_on_the_best_thought_of_a_line() -> None:
    assert revisions(4, 20, gain=1.0)[1] == 3 + 2  # two rounds


@pytest.mark.parametrize(("drafts", "iterations"), [(1, 1), (1, 9), (2, 3), (5, 17), (7, 100), (8, 10), (32, 32)])
def test_every_thought_of_the_budget_is_used(drafts: int, iterations: int) -> None:
    assert revisions(drafts, iterations)[0].total() == iterations


def test_revisions_fewer_than_rounds_go_to_the_best_draft() -> None:
    assert revisions(8, 10)[0]["7"] == 3


def test_more_drafts_than_thoughts_are_refused() -> None:
    with pytest.raises(OptionError, match="40 drafts are more than 32 iterations: raise iterations"):
        named("halving:drafts=40", SEARCHES)
