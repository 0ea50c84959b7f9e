"""Blocksworld's states: possible starts and reachable goals."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest

from tot.decoders.errors import TaskError
from tot.tasks.blocks import Facts, check, unreachable
from tot.tasks.blocks_planner import shortest_plan
from tot.tasks.pddl import Fact, Problem


def all_facts(blocks: str) -> list[Fact]:
    pairs = [("on", x, y) for x in blocks for y in blocks]
    return [*pairs, *((kind, x) for kind in ("ontable", "clear", "holding") for x in blocks), ("handempty",)]


@pytest.mark.parametrize(
    ("init", "message"),
    [
        ("on b a, ontable a, clear b, handempty, ontable b", "b is on the table and b is on a exclude"),
        ("on b a, on a b, handempty", "are stacked in a cycle"),
        ("on b b, ontable a, clear a, handempty", "b is on itself"),
        ("ontable a, ontable b, clear a, handempty", "nothing is on b, but (clear b) is missing"),
        ("on b a, ontable a, clear a, clear b, handempty", "b is on a and a is clear exclude"),
        ("ontable a, clear a, clear b, handempty", "b has no place"),
        ("ontable a, ontable b, clear a, clear b", "the hand holds nothing, but (handempty) is missing"),
        ("ontable a, clear a, holding b, handempty", "the hand holds b and the hand is empty exclude"),
        ("ontable a, clear a, holding b, clear b", "the hand holds b and b is clear exclude"),
        ("holding a, holding b", "the hand holds b and the hand holds a exclude"),
        ("ontable a, on b a, on c a, clear b, clear c, handempty", "c is on a and b is on a exclude"),
        ("on a b, holding b, clear a", "a is on b and the hand holds b exclude"),
    ],
)
def test_an_impossible_start_error_names_the_fact(init: str, message: str, problem_of: Callable[..., Problem]) -> None:
    blocks = sorted({block for fact in init.split(", ") for block in fact.split()[1:]})
    with pytest.raises(TaskError) as caught:
        check(problem_of("".join(blocks), init, "on a b"))
    assert message in str(caught.value)


def test_the_possible_starts_are_exactly_the_reachable_states(
    reachable: Callable[..., list[Facts]], start_of: Callable[..., Facts]
) -> None:
    """Check all sets of facts about two blocks."""
    states = set(reachable(start_of("ab")))
    facts = all_facts("ab")
    passed = set()
    for chosen in itertools.product((False, True), repeat=len(facts)):
        init = frozenset(itertools.compress(facts, chosen))
        try:
            check(Problem(("a", "b"), init, frozenset()))
        except TaskError:
            continue
        passed.add(init)
    assert passed == states
    assert len(states) == 3 + 2


@pytest.mark.parametrize("size", [1, 2, 3])
def test_a_goal_is_unreachable_if_no_state_has_all_its_facts(
    size: int, reachable: Callable[..., list[Facts]], start_of: Callable[..., Facts]
) -> None:
    states, counts = reachable(start_of("abc")), {True: 0, False: 0}
    for goal in map(frozenset, itertools.combinations(all_facts("abc"), size)):
        why = unreachable(Problem(("a", "b", "c"), states[0], goal))
        assert (why is None) == any(goal <= facts for facts in states), (sorted(goal), why)
        counts[why is None] += 1
    assert min(counts.values()) >= 3


def test_a_goal_about_an_unknown_block_is_unreachable(problem_of: Callable[..., Problem]) -> None:
    problem = problem_of("ab", "ontable a, ontable b, clear a, clear b, handempty", "on a z")
    assert unreachable(problem) == "there is no block z"
    assert shortest_plan(problem) is None
