"""What tests of the blocks' world share: the domain written down again, and searches over all of its states.

Import mode is importlib, so these are fixtures: functions.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import pytest

from tot.tasks.blocks import Facts, apply, legal_actions
from tot.tasks.pddl import Problem

# The domain's definition: name, parameters, preconditions, facts added, facts deleted.
DOMAIN = {
    "pick-up": ("x", "clear x, ontable x, handempty", "holding x", "clear x, ontable x, handempty"),
    "put-down": ("x", "holding x", "clear x, handempty, ontable x", "holding x"),
    "stack": ("x y", "clear y, holding x", "handempty, clear x, on x y", "clear y, holding x"),
    "unstack": ("x y", "on x y, clear x, handempty", "holding x, clear y", "on x y, clear x, handempty"),
}


def simulate(facts: set[str], step: str) -> set[str] | None:
    """One step by the definition: facts are texts; None where it is not possible."""
    name, *blocks = step.strip("()").split()
    parameters, *lists = DOMAIN[name]
    bound = dict(zip(parameters.split(), blocks, strict=True))
    needs, adds, deletes = (
        {" ".join(bound.get(word, word) for word in fact.split()) for fact in text.split(", ")} for text in lists
    )
    return (facts - deletes) | adds if needs <= facts else None


def solves(problem: Problem, plan: list[str]) -> tuple[bool, int | None]:
    """Whether a plan is right, and its first step that is not possible, by the definition."""
    facts: set[str] | None = {" ".join(fact) for fact in problem.init}
    for number, step in enumerate(plan, 1):
        assert facts is not None
        facts = simulate(facts, step)
        if facts is None:
            return False, number
    assert facts is not None
    return {" ".join(fact) for fact in problem.goal} <= facts, None


def problem_of(blocks: str, init: str, goal: str) -> Problem:
    """From facts written as `on a b, clear a`."""
    start, end = (frozenset(tuple(fact.split()) for fact in text.split(", ") if fact) for text in (init, goal))
    return Problem(tuple(blocks), start, end)


THREE = problem_of("abc", "on b a, ontable a, ontable c, clear b, clear c, handempty", "on a c")


def reachable(start: Facts) -> list[Facts]:
    """All states, nearest first."""
    found = {start: None}
    queue = deque(found)
    while queue:
        facts = queue.popleft()
        after = [apply(facts, action) or facts for action in legal_actions(facts)]
        queue.extend(new for new in after if new not in found)
        found.update(dict.fromkeys(after))
    return list(found)


def distances(states: list[Facts], goal: Facts) -> dict[Facts, int]:
    """True steps to the goal from each state; every action can be undone by one other, so they are walked backwards."""
    steps = {facts: 0 for facts in states if goal <= facts}
    queue = deque(steps)
    while queue:
        facts = queue.popleft()
        for action in legal_actions(facts):
            before = apply(facts, action) or facts
            if before not in steps:
                steps[before] = steps[facts] + 1
                queue.append(before)
    return steps


def start_of(blocks: str) -> Facts:
    """All blocks on the table."""
    return frozenset([("handempty",), *((kind, x) for kind in ("ontable", "clear") for x in blocks)])


@pytest.fixture(name="simulate")
def _simulate() -> Callable[..., set[str] | None]:
    return simulate


@pytest.fixture(name="solves")
def _solves() -> Callable[..., tuple[bool, int | None]]:
    return solves


@pytest.fixture(name="problem_of")
def _problem_of() -> Callable[..., Problem]:
    return problem_of


@pytest.fixture(name="three")
def _three() -> Any:
    return THREE


@pytest.fixture(name="reachable")
def _reachable() -> Callable[..., list[Facts]]:
    return reachable


@pytest.fixture(name="distances")
def _distances() -> Callable[..., dict[Facts, int]]:
    return distances


@pytest.fixture(name="start_of")
def _start_of() -> Callable[..., Facts]:
    return start_of
