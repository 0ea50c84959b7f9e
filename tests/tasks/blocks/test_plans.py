"""Blocksworld's plans: verification, shortest plans, and the plain plan."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tot.tasks.blocks import Facts, apply, check, legal_actions
from tot.tasks.blocks import solves as solved_by
from tot.tasks.blocks_planner import estimate, plain_plan, shortest_plan
from tot.tasks.pddl import Problem, read_problem


@pytest.fixture(scope="module")
def rows(data: Path) -> list[dict[str, Any]]:
    lines = (data / "blocksworld_dev.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


@pytest.mark.parametrize(
    ("plan", "right"),
    [
        (["(unstack b a)", "(put-down b)", "(pick-up a)", "(stack a c)"], True),
        (["unstack b from a", "put down b", "pick up a", "stack a on c"], True),
        (["(pick-up a)"], False),
        (["(unstack b a)", "(stack b z)"], False),
        (["(unstack b a)", "fly"], False),
        (["(unstack b a)", "(put-down b)"], False),
        ([], False),
    ],
)
def test_a_plan_is_valid_if_every_step_is_possible_and_the_goal_is_reached(
    plan: list[str], right: bool, three: Any
) -> None:
    assert solved_by(three, plan) == right


def test_real_and_altered_plans_are_judged_by_the_domain_definition(
    rows: list[dict[str, Any]], solves: Callable[..., tuple[bool, int | None]]
) -> None:
    assert len(rows) == 352
    wrong = 0
    for row in rows:
        problem, plan = read_problem(row["pddl"]), row["plan"]
        check(problem)
        assert solves(problem, plan) == (True, None)
        assert solved_by(problem, plan)
        broken, altered = 0, list(alterations(plan, problem.objects))
        for other in altered:
            valid, _ = solves(problem, other)
            assert solved_by(problem, other) == valid, other
            broken += not valid
        assert broken >= len(altered) * 0.7
        wrong += broken
    assert wrong > 10_000


def alterations(plan: list[str], blocks: tuple[str, ...]) -> Iterator[list[str]]:
    """Yield the plan with one action dropped, two neighbours swapped, or one action altered."""
    for place, step in enumerate(plan):
        yield plan[:place] + plan[place + 1 :]
        if place:
            yield [*plan[: place - 1], step, plan[place - 1], *plan[place + 1 :]]
        name, *named = step.strip("()").split()
        others = {"pick-up": "put-down", "put-down": "pick-up", "stack": "unstack", "unstack": "stack"}
        yield [*plan[:place], f"({' '.join((others[name], *named))})", *plan[place + 1 :]]
        for index, block in itertools.product(range(len(named)), blocks):
            if block not in named:
                changed = [*named[:index], block, *named[index + 1 :]]
                yield [*plan[:place], f"({' '.join((name, *changed))})", *plan[place + 1 :]]


def test_shortest_plans_are_as_long_as_the_reference_plans(
    rows: list[dict[str, Any]], solves: Callable[..., tuple[bool, int | None]]
) -> None:
    for row in rows:
        problem = read_problem(row["pddl"])
        plan = shortest_plan(problem) or []
        assert solves(problem, plan) == (True, None)
        assert len(plan) == row["steps"] == len(row["plan"])
        assert shortest_plan(problem, limit=row["steps"]) == plan
        assert shortest_plan(problem, limit=row["steps"] - 1) is None


@pytest.mark.parametrize("blocks", ["ab", "abc", "abcd"])
def test_the_estimate_is_admissible_and_drops_by_at_most_one_a_step(
    blocks: str,
    reachable: Callable[..., list[Facts]],
    distances: Callable[..., dict[Facts, int]],
    start_of: Callable[..., Facts],
    solves: Callable[..., tuple[bool, int | None]],
) -> None:
    """Check goals of all kinds from every state, and shortest plans against breadth-first search."""
    rng, states = random.Random(0), reachable(start_of(blocks))
    exact = cases = 0
    for _ in range(150 if len(blocks) == 4 else 60):
        facts_there = sorted(rng.choice(states))
        goal = frozenset(rng.sample(facts_there, rng.randint(1, min(4, len(facts_there)))))
        true = distances(states, goal)
        assert len(true) == len(states)
        for facts in states:
            guess = estimate(facts, goal)
            assert guess <= true[facts]
            assert (guess == 0) == (true[facts] == 0)
            exact += guess == true[facts]
            cases += 1
            for action in legal_actions(facts):
                assert guess <= 1 + estimate(apply(facts, action) or facts, goal), (sorted(facts), action, sorted(goal))
        for facts in rng.sample(states, 4):
            plan = shortest_plan(Problem(tuple(blocks), facts, goal)) or []
            assert len(plan) == true[facts]
            assert solves(Problem(tuple(blocks), facts, goal), plan) == (True, None)
            plain = plain_plan(Problem(tuple(blocks), facts, goal))
            assert len(plain) >= len(plan)
            assert solves(Problem(tuple(blocks), facts, goal), plain) == (True, None)
    assert exact > 0.7 * cases  # it separates near states from distant ones


def test_a_plain_plan_unstacks_everything_and_builds_the_goal(problem_of: Callable[..., Problem]) -> None:
    start = "on a b, ontable b, clear a, ontable c, clear c, handempty"
    plan = plain_plan(problem_of("abc", start, "on c b, on b a"))
    assert plan == [
        "(unstack a b)",
        "(put-down a)",
        "(pick-up b)",
        "(stack b a)",
        "(pick-up c)",
        "(stack c b)",
    ]
    assert plain_plan(problem_of("abc", start, "on a b")) == []
