"""The rules of Blocksworld: actions, possible problems, plans, the estimate and generated problems."""

from __future__ import annotations

import itertools
import json
import random
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tot.decoders.errors import TaskError
from tot.tasks.blocks import Action, Fact, Facts, Problem, apply, check, legal_actions, parse_action
from tot.tasks.blocks import solves as solved_by
from tot.tasks.blocks_planner import estimate, generate, plain_plan, shortest_plan
from tot.tasks.pddl import read_problem

# The domain's definition: name, parameters, preconditions, added facts, deleted facts.
DOMAIN = {
    "pick-up": ("x", "clear x, ontable x, handempty", "holding x", "clear x, ontable x, handempty"),
    "put-down": ("x", "holding x", "clear x, handempty, ontable x", "holding x"),
    "stack": ("x y", "clear y, holding x", "handempty, clear x, on x y", "clear y, holding x"),
    "unstack": ("x y", "on x y, clear x, handempty", "holding x, clear y", "on x y, clear x, handempty"),
}
WORDS = ("pick", "up", "put", "down", "stack", "unstack", "a", "the", "block", "on", "from", "table", "(", ")", ",")


def simulate(facts: set[str], step: str) -> set[str] | None:
    """Apply one step by the definition. Facts are texts; return None if the step is impossible."""
    name, *blocks = step.strip("()").split()
    parameters, *lists = DOMAIN[name]
    bound = dict(zip(parameters.split(), blocks, strict=True))
    needs, adds, deletes = (
        {" ".join(bound.get(word, word) for word in fact.split()) for fact in text.split(", ")} for text in lists
    )
    return (facts - deletes) | adds if needs <= facts else None


def solves(problem: Problem, plan: list[str]) -> bool:
    """Return whether a plan is valid by the definition."""
    facts: set[str] | None = {" ".join(fact) for fact in problem.init}
    for step in plan:
        facts = None if facts is None else simulate(facts, step)
    return facts is not None and {" ".join(fact) for fact in problem.goal} <= facts


def problem_of(blocks: str, init: str, goal: str) -> Problem:
    """Make a problem from facts written as `on a b, clear a`."""
    start, end = (frozenset(tuple(fact.split()) for fact in text.split(", ") if fact) for text in (init, goal))
    return Problem(tuple(blocks), start, end)


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


THREE = problem_of("abc", "on b a, ontable a, ontable c, clear b, clear c, handempty", "on a c")


@pytest.fixture(scope="module")
def rows(data: Path) -> list[dict[str, Any]]:
    lines = (data / "blocksworld_dev.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


# -- actions ----------------------------------------------------------------------------------------------------


def test_every_action_matches_the_domain_definition() -> None:
    actions = [
        *(Action(name, (x,)) for name in ("pick-up", "put-down") for x in "abc"),
        *(Action(name, (x, y)) for name in ("stack", "unstack") for x, y in itertools.permutations("abc", 2)),
    ]
    states = reachable(start_of("abc"))
    assert len(states) == 13 + 9  # 13 with an empty hand; 3 held times 3 arrangements of the others
    for facts in states:
        legal = []
        for action in actions:
            expected = simulate({" ".join(fact) for fact in facts}, action.pddl)
            after = apply(facts, action)
            assert (after and {" ".join(fact) for fact in after}) == expected
            legal += [action.pddl] if after else []
        assert sorted(legal) == sorted(action.pddl for action in legal_actions(facts))


@given(st.text() | st.lists(st.sampled_from(WORDS)).map(" ".join))
def test_a_parsed_action_parses_back_to_itself(text: str) -> None:
    action = parse_action(text)
    if action:
        assert parse_action(action.pddl) == parse_action(action.text) == action


# -- possible problems ------------------------------------------------------------------------------------------


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
def test_an_impossible_start_error_names_the_fact(init: str, message: str) -> None:
    blocks = sorted({block for fact in init.split(", ") for block in fact.split()[1:]})
    with pytest.raises(TaskError) as caught:
        check(problem_of("".join(blocks), init, "on a b"))
    assert message in str(caught.value)


def test_the_possible_starts_are_exactly_the_reachable_states() -> None:
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
def test_a_goal_is_refused_if_no_state_has_all_its_facts(size: int) -> None:
    states, counts = reachable(start_of("abc")), {True: 0, False: 0}
    for goal in map(frozenset, itertools.combinations(all_facts("abc"), size)):
        possible = True
        try:
            check(Problem(("a", "b", "c"), states[0], goal))
        except TaskError:
            possible = False
        assert possible == any(goal <= facts for facts in states), sorted(goal)
        counts[possible] += 1
    assert min(counts.values()) >= 3


# -- plans ------------------------------------------------------------------------------------------------------


def test_real_and_altered_plans_are_judged_by_the_domain_definition(rows: list[dict[str, Any]]) -> None:
    assert len(rows) == 352
    wrong = 0
    for row in rows:
        problem, plan = read_problem(row["pddl"]), row["plan"]
        check(problem)
        assert solves(problem, plan)
        assert solved_by(problem, plan)
        altered = list(alterations(plan, problem.objects))
        valid = [solves(problem, other) for other in altered]
        assert [solved_by(problem, other) for other in altered] == valid
        assert sum(valid) <= len(altered) * 0.3
        wrong += valid.count(False)
    assert wrong > 10_000
    assert not solved_by(THREE, ["(unstack b a)", "fly"])
    assert not solved_by(THREE, [])


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


def test_shortest_plans_are_as_long_as_the_reference_plans(rows: list[dict[str, Any]]) -> None:
    for row in rows:
        problem = read_problem(row["pddl"])
        plan = shortest_plan(problem) or []
        assert solves(problem, plan)
        assert len(plan) == row["steps"] == len(row["plan"])
        assert shortest_plan(problem, limit=row["steps"]) == plan
        assert shortest_plan(problem, limit=row["steps"] - 1) is None


@pytest.mark.parametrize("blocks", ["ab", "abc", "abcd"])
def test_the_estimate_is_admissible_and_drops_by_at_most_one_a_step(blocks: str) -> None:
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
            problem = Problem(tuple(blocks), facts, goal)
            plan, plain = shortest_plan(problem) or [], plain_plan(problem)
            assert len(plain) >= len(plan) == true[facts]
            assert solves(problem, plan)
            assert solves(problem, plain)
    assert exact > 0.7 * cases  # it separates near states from distant ones


# -- generated problems -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("blocks", [2, 3, 4])
def test_every_possible_length_is_generated(blocks: int) -> None:
    bound = 4 * (blocks - 1)
    for steps, seed in itertools.product(range(2, bound + 1, 2), range(5)):
        problem = generate(seed, blocks, steps)
        check(problem)
        assert len(problem.objects) == blocks
        assert distances(reachable(problem.init), problem.goal)[problem.init] == steps
    assert len(shortest_plan(generate(7, 6, 10)) or []) == 10


def test_problems_are_equal_only_for_equal_seeds() -> None:
    assert generate(3, 5, 8) == generate(3, 5, 8)
    assert len({generate(seed, 5, 8) for seed in range(20)}) == 20


@pytest.mark.parametrize(
    ("blocks", "steps", "message"),
    [
        (4, 14, "no problem of 4 blocks takes 14 steps: give an even number from 2 to 12"),
        (4, 5, "no problem of 4 blocks takes 5 steps"),
        (1, 2, "blocks=1: give 2 to 6"),
    ],
)
def test_an_impossible_length_error_names_the_range(blocks: int, steps: int, message: str) -> None:
    with pytest.raises(TaskError, match=message):
        generate(0, blocks, steps)
