"""The world of Blocksworld against an independent simulator, and its shortest plans against a plain search."""

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
from tot.tasks.blocks import (
    Action,
    Facts,
    apply,
    check,
    legal_actions,
    parse_action,
    unreachable,
    validate_plan,
    why_not,
)
from tot.tasks.blocks_planner import estimate, generate, plain_plan, shortest_plan
from tot.tasks.pddl import Fact, Problem, read_problem

WORDS = ("pick", "up", "put", "down", "stack", "unstack", "a", "the", "block", "on", "from", "table", "(", ")", ",")

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


@pytest.fixture(scope="module")
def rows(data: Path) -> list[dict[str, Any]]:
    lines = (data / "blocksworld_dev.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


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


def all_facts(blocks: str) -> list[Fact]:
    pairs = [("on", x, y) for x in blocks for y in blocks]
    return [*pairs, *((kind, x) for kind in ("ontable", "clear", "holding") for x in blocks), ("handempty",)]


def start_of(blocks: str) -> Facts:
    """All blocks on the table."""
    return frozenset([("handempty",), *((kind, x) for kind in ("ontable", "clear") for x in blocks)])


# -- actions ----------------------------------------------------------------------------------------------------


def test_every_action_does_what_the_domain_says() -> None:
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
            assert (why_not(facts, action) is None) == (expected is not None)
            legal += [action.pddl] if after else []
        assert sorted(legal) == sorted(action.pddl for action in legal_actions(facts))


def test_legal_actions_come_in_a_fixed_order() -> None:
    assert [action.text for action in legal_actions(THREE.init)] == ["unstack b from a", "pick up c"]
    held = apply(THREE.init, Action("unstack", ("b", "a")))
    assert held is not None
    assert [action.pddl for action in legal_actions(held)] == ["(put-down b)", "(stack b a)", "(stack b c)"]


@pytest.mark.parametrize(
    ("text", "pddl"),
    [
        ("(pick-up a)", "(pick-up a)"),
        ("pick up a", "(pick-up a)"),
        ("Pick up the block A.", "(pick-up a)"),
        ("pick up the red block", "(pick-up red)"),
        ("pick up a block", "(pick-up a)"),
        ("pick up a block b", "(pick-up b)"),
        ("pick b up from the table", "(pick-up b)"),
        ("PICKUP b", "(pick-up b)"),
        ("put down a", "(put-down a)"),
        ("put the b block down on the table.", "(put-down b)"),
        ("put block b on the table", "(put-down b)"),
        (" (put-down b1) ", "(put-down b1)"),
        ("stack a on b", "(stack a b)"),
        ("stack the a block on top of the b block!", "(stack a b)"),
        ("**stack b onto a**", "(stack b a)"),
        ("(stack a, b)", "(stack a b)"),
        ("stack a b", "(stack a b)"),
        ("unstack b from c", "(unstack b c)"),
        ("Unstack Block B from on top of the C Block", "(unstack b c)"),
        ("unstack b off c", "(unstack b c)"),
        ("( UNSTACK   b\tc )", "(unstack b c)"),
        ("", None),
        ("pick up", None),
        ("pick up a and b", None),
        ("pick up the table", None),
        ("stack a", None),
        ("stack a on", None),
        ("stack a under b", None),
        ("stack a on b on c", None),
        ("unstack b c d", None),
        ("unstack a on b", None),
        ("(pick-up a b)", None),
        ("put a", None),
        ("move a", None),
        ("pick up é", None),
        ("I think we should pick up a", None),
    ],
)
def test_an_action_is_read_in_either_form_loosely(text: str, pddl: str | None) -> None:
    action = parse_action(text)
    assert (action and action.pddl) == pddl


@given(st.text() | st.lists(st.sampled_from(WORDS)).map(" ".join))
def test_any_text_is_an_action_that_reads_back_or_none(text: str) -> None:
    action = parse_action(text)
    if action:
        assert parse_action(action.pddl) == parse_action(action.text) == action


# -- starts and goals -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("init", "message"),
    [
        ("on b a, ontable a, clear b, handempty, ontable b", "b is on the table and b is on a exclude"),
        ("on b a, on a b, handempty", "stand on each other in a circle"),
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
def test_an_impossible_start_is_refused_by_name(init: str, message: str) -> None:
    blocks = sorted({block for fact in init.split(", ") for block in fact.split()[1:]})
    with pytest.raises(TaskError) as caught:
        check(problem_of("".join(blocks), init, "on a b"))
    assert message in str(caught.value)


def test_exactly_the_states_of_the_world_are_possible_starts() -> None:
    """Of all sets of facts about two blocks."""
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
def test_a_goal_is_unreachable_where_no_state_has_all_its_facts(size: int) -> None:
    states, counts = reachable(start_of("abc")), {True: 0, False: 0}
    for goal in map(frozenset, itertools.combinations(all_facts("abc"), size)):
        why = unreachable(Problem(("a", "b", "c"), states[0], goal))
        assert (why is None) == any(goal <= facts for facts in states), (sorted(goal), why)
        counts[why is None] += 1
    assert min(counts.values()) >= 3


def test_a_goal_about_an_unknown_block_is_unreachable() -> None:
    problem = problem_of("ab", "ontable a, ontable b, clear a, clear b, handempty", "on a z")
    assert unreachable(problem) == "there is no block z"
    assert shortest_plan(problem) is None


# -- plans ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("plan", "wrong_step", "reason"),
    [
        (["(unstack b a)", "(put-down b)", "(pick-up a)", "(stack a c)"], None, ""),
        (["unstack b from a", "put down b", "pick up a", "stack a on c"], None, ""),
        (["(pick-up a)"], 1, "step 1, (pick-up a): a is not clear"),
        (["(pick-up b)"], 1, "step 1, (pick-up b): b is not on the table"),
        (["(unstack b a)", "(pick-up c)"], 2, "step 2, (pick-up c): the hand is not empty"),
        (["(unstack b c)"], 1, "step 1, (unstack b c): b is not on c"),
        (["(put-down b)"], 1, "step 1, (put-down b): the hand does not hold b"),
        (["(unstack b a)", "(stack b z)"], 2, "step 2, (stack b z): there is no block z"),
        (["(unstack b a)", "fly"], 2, "step 2, 'fly': not an action"),
        (["(unstack b a)", "(put-down b)"], None, "the goal is not reached: a is not on c"),
        ([], None, "the goal is not reached: a is not on c"),
    ],
)
def test_a_plan_is_judged_by_its_first_wrong_step(plan: list[str], wrong_step: int | None, reason: str) -> None:
    result = validate_plan(THREE, plan)
    assert (result.valid, result.wrong_step, result.reason) == (not reason, wrong_step, reason)


def test_real_plans_are_right_and_altered_ones_are_judged_as_the_domain_says(rows: list[dict[str, Any]]) -> None:
    assert len(rows) == 352
    wrong = 0
    for row in rows:
        problem, plan = read_problem(row["pddl"]), row["plan"]
        check(problem)
        assert solves(problem, plan) == (True, None)
        assert validate_plan(problem, plan).valid
        broken, altered = 0, list(alterations(plan, problem.objects))
        for other in altered:
            valid, wrong_step = solves(problem, other)
            result = validate_plan(problem, other)
            assert (result.valid, result.wrong_step) == (valid, wrong_step), other
            assert bool(result.reason) == (not valid)
            broken += not valid
        assert broken >= len(altered) * 0.7
        wrong += broken
    assert wrong > 10_000


def alterations(plan: list[str], blocks: tuple[str, ...]) -> Iterator[list[str]]:
    """A plan with one action dropped, two neighbours swapped, or one action altered."""
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


def test_no_plan_is_shorter_than_the_shortest_nor_are_the_real_ones(rows: list[dict[str, Any]]) -> None:
    for row in rows:
        problem = read_problem(row["pddl"])
        plan = shortest_plan(problem) or []
        assert solves(problem, plan) == (True, None)
        assert len(plan) == row["steps"] == len(row["plan"])
        assert shortest_plan(problem, limit=row["steps"]) == plan
        assert shortest_plan(problem, limit=row["steps"] - 1) is None


@pytest.mark.parametrize("blocks", ["ab", "abc", "abcd"])
def test_the_estimate_is_never_too_high_and_falls_by_one_at_most(blocks: str) -> None:
    """For goals of all kinds, from every state; and shortest plans are as long as a plain search says."""
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
            plain = plain_plan(Problem(tuple(blocks), facts, goal)) or []
            assert len(plain) >= len(plan)
            assert solves(Problem(tuple(blocks), facts, goal), plain) == (True, None)
    assert exact > 0.7 * cases  # it tells near states from far ones


def test_a_plain_plan_takes_all_down_and_builds_the_goal() -> None:
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
    assert plain_plan(problem_of("abc", start, "on a z")) is None


def test_a_search_that_grows_too_large_says_so() -> None:
    problem = generate(seed=1, blocks=8, steps=20)
    with pytest.raises(TaskError, match="among 3 states"):
        shortest_plan(problem, states=3)


# -- generated problems -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("blocks", [2, 3, 4])
def test_every_length_that_is_possible_is_generated(blocks: int) -> None:
    most = 4 * (blocks - 1)
    for steps, seed in itertools.product(range(2, most + 1, 2), range(5)):
        problem = generate(seed, blocks, steps)
        check(problem)
        assert len(problem.objects) == blocks
        assert distances(reachable(problem.init), problem.goal)[problem.init] == steps
    names = "abcd"[:blocks]
    towers = [frozenset(("on", x, y) for x, y in itertools.pairwise(order)) for order in itertools.permutations(names)]
    assert max(max(distances(reachable(start_of(names)), goal).values()) for goal in towers) <= most + 1  # one in hand


@pytest.mark.parametrize(("blocks", "steps"), [(5, 16), (8, 10), (12, 24), (20, 2), (20, 12), (20, 38), (20, 76)])
def test_large_problems_have_the_length_asked_for(blocks: int, steps: int) -> None:
    problem = generate(7, blocks, steps)
    check(problem)
    plan = shortest_plan(problem) or []
    assert len(plan) == steps
    assert solves(problem, plan) == (True, None)


def test_equal_seeds_give_equal_problems_and_others_differ() -> None:
    assert generate(3, 6, 8) == generate(3, 6, 8)
    assert len({generate(seed, 6, 8) for seed in range(20)}) == 20


@pytest.mark.parametrize(
    ("blocks", "steps", "message"),
    [
        (4, 14, "no problem of 4 blocks takes 14 steps: give an even number from 2 to 12"),
        (4, 5, "no problem of 4 blocks takes 5 steps"),
        (4, 0, "from 2 to 12"),
        (1, 2, "blocks=1: give from 2 to 20"),
        (21, 2, "blocks=21: give from 2 to 20"),
    ],
)
def test_an_impossible_length_is_refused_with_the_range(blocks: int, steps: int, message: str) -> None:
    with pytest.raises(TaskError, match=message):
        generate(0, blocks, steps)
