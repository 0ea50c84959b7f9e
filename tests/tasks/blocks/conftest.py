"""Shared helpers of the Blocksworld tests: an independent definition of the domain, and searches over all its states.

They are fixtures because the import mode is importlib.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import pytest

from tot.tasks.blocks import Facts, apply, legal_actions
from tot.tasks.pddl import Problem

# The domain's definition: name, parameters, preconditions, added facts, deleted facts.
DOMAIN = {
    "pick-up": ("x", "clear x, ontable x, handempty", "holding x", "clear x, ontable x, handempty"),
    "put-down": ("x", "holding x", "clear x, handempty, ontable x", "holding x"),
    "stack": ("x y", "clear y, holding x", "handempty, clear x, on x y", "clear y, holding x"),
    "unstack": ("x y", "on x y, clear x, handempty", "holding x, clear y", "on x y, clear x, handempty"),
}


def simulate(facts: set[str], step: str) -> set[str] | None:
    """Apply one step by the definition. Facts are texts; return None if the step is impossible."""
    name, *blocks = step.strip("()").split()
    parameters, *lists = DOMAIN[name]
    bound = dict(zip(parameters.split(), blocks, strict=True))
    needs, adds, deletes = (
        {" ".join(bound.get(word, word) for word in fact.split()) for fact in text.split(", ")} for text in lists
    )
    return (facts - deletes) | adds if needs <= facts else None


def solves(problem: Problem, plan: list[str]) -> tuple[bool, int | None]:
    """Return whether a plan is valid by the definition, and the index of its first impossible step."""
    facts: set[str] | None = {" ".join(fact) for fact in problem.init}
    for number, step in enumerate(plan, 1):
        assert facts is not None
        facts = simulate(facts, step)
        if facts is None:
            return False, number
    assert facts is not None
    return {" ".join(fact) for fact in problem.goal} <= facts, None


def problem_of(blocks: str, init: str, goal: str) -> Problem:
    """Make a problem from facts written as `on a b, clear a`."""
    start, end = (frozenset(tuple(fact.split()) for fact in text.split(", ") if fact) for text in (init, goal))
    return Problem(tuple(blocks), start, end)


THREE = problem_of("abc", "on b a, ontable a, ontable c, clear b, clear c, handempty", "on a c")


def reachable(start: Facts) -> list[Facts]:
    """Return all reachable states, nearest first."""
    reached = {start: None}
    queue = deque(reached)
    while queue:
        facts = queue.popleft()
        after = [apply(facts, action) or facts for action in legal_actions(facts)]
        queue.extend(new for new in after if new not in reached)
        reached.update(dict.fromkeys(after))
    return list(reached)


def distances(states: list[Facts], goal: Facts) -> dict[Facts, int]:
    """Return the true number of steps to the goal from each state.

    Every action can be undone by one other action, so the search walks backwards from the goal.
    """
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
    """Return the state with all blocks on the table."""
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
