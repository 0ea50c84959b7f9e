"""Shortest and plain plans for Blocksworld, the heuristic of A*, and random problems of a given plan length.

Searches over thoughts are compared with these plans and never see them. This module knows nothing of tasks or models.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Sequence
from functools import lru_cache

from tot.decoders.errors import TaskError
from tot.tasks.blocks import TABLE, Action, Fact, Facts, Problem, apply, legal_actions, places

_TRIES = 5_000
"""Maximum random problems to try for one with the given plan length."""


def shortest_plan(problem: Problem, limit: int | None = None) -> list[str] | None:
    """Return a shortest plan, as PDDL; None if no plan of at most `limit` steps reaches the goal.

    The search is breadth-first, which is feasible for few blocks only.
    """
    plans: dict[Facts, list[str]] = {problem.init: []}
    queue = deque(plans)
    while queue:
        facts = queue.popleft()
        plan = plans[facts]
        if problem.goal <= facts:
            return plan
        for action in legal_actions(facts) if limit is None or len(plan) < limit else ():
            after = apply(facts, action)
            if after is not None and after not in plans:
                plans[after] = [*plan, action.pddl]
                queue.append(after)
    return None


def estimate(facts: Facts, goal: Facts) -> int:
    """Return a lower bound on the steps to a goal: often exact, and consistent (it decreases by at most 1 per step).

    A block that must move is picked up and put down, twice if a block under it must move in between.
    """
    on, (goal_places, supports) = places(facts), _goal_places(goal)
    moving = _moving(on, goal)
    held = next((fact[1] for fact in facts if fact[0] == "holding"), None)
    goal_held = next((fact[1] for fact in goal if fact[0] == "holding"), None)
    total = 0
    for block in moving:
        under = set()
        below = on[block]
        while below:
            if below in moving:
                under.add(below)
            below = on.get(below, TABLE)
        if block == goal_held:
            total += 3 if under else 1
        else:
            total += 2 if under.isdisjoint(supports.get(block, ())) else 4
    if held is not None and held == goal_held:
        total += 2 if moving else 0
    elif held is not None:
        place = goal_places.get(held, TABLE)
        total += 1 if not place or (("clear", place) in facts and place not in moving) else 3
    # If the goal allows it, the last block may stay in the hand.
    if goal_held is None and ("handempty",) not in goal:
        named = {block for fact in goal for block in fact[1:]}
        total -= any(block not in named for block in ({*moving, held} - {None}))
    return total


def _moving(on: dict[str, str], goal: Facts) -> set[str]:
    """Return the blocks that must be picked up, now or later."""
    goal_places = _goal_places(goal)[0]
    freed = {place for block, place in goal_places.items() if on.get(block) != place} - {TABLE}
    freed.update(fact[1] for fact in goal if fact[0] == "clear")
    moving = {x for x, y in on.items() if goal_places.get(x, y) != y or y in freed or ("holding", x) in goal}
    above = {y: x for x, y in on.items() if y}
    for block in list(moving):
        over = above.get(block)
        while over is not None and over not in moving:
            moving.add(over)
            over = above.get(over)
    return moving


@lru_cache(maxsize=256)
def _goal_places(goal: Facts) -> tuple[dict[str, str], dict[str, frozenset[str]]]:
    """Return the goal's place of each block, and all blocks below that place."""
    goal_places = places(goal)
    supports = {}
    for block in goal_places:
        under: list[str] = []
        place = goal_places[block]
        while place and place not in under:
            under.append(place)
            place = goal_places.get(place, TABLE)
        supports[block] = frozenset(under)
    return goal_places, supports


def plain_plan(problem: Problem) -> list[str]:
    """Return a simple deterministic plan, as PDDL, for a problem with a reachable goal.

    All blocks are put on the table, pile by pile from the top, then the goal is built from the bottom, in alphabetical
    order. It needs no search, so it is easier to learn than a shortest plan.
    """
    if problem.goal <= problem.init:
        return []
    under, goal_places = places(problem.init), places(problem.goal)
    plan = [Action("put-down", (fact[1],)) for fact in problem.init if fact[0] == "holding"]
    for block in sorted(under.keys() - under.values()):
        while (below := under[block]) != TABLE:
            plan += [Action("unstack", (block, below)), Action("put-down", (block,))]
            block = below
    waiting = sorted(block for block, below in goal_places.items() if below != TABLE)
    while waiting:
        block = next(block for block in waiting if goal_places[block] not in waiting)
        waiting.remove(block)
        plan += [Action("pick-up", (block,)), Action("stack", (block, goal_places[block]))]
    plan += [Action("pick-up", (fact[1],)) for fact in problem.goal if fact[0] == "holding"]
    return [action.pddl for action in plan]


def generate(seed: int, blocks: int, steps: int) -> Problem:
    """Generate a random problem of 2 to 6 blocks whose shortest plan has `steps` steps, and whose goal has only "on".

    `steps` is even, as each move is a pick and a put, and at most 4 * (blocks - 1), which suffices for any goal. Equal
    arguments give equal problems. Raises TaskError for other numbers, and if no problem is found.
    """
    if not 2 <= blocks <= 6:
        raise TaskError(f"blocks={blocks}: give 2 to 6")
    max_steps = 4 * (blocks - 1)
    if steps not in range(2, max_steps + 1, 2):
        raise TaskError(f"no problem of {blocks} blocks takes {steps} steps: give an even number from 2 to {max_steps}")
    rng = random.Random(f"{seed} {blocks} {steps}")
    names = [chr(ord("a") + index) for index in range(blocks)]
    for _ in range(_TRIES):
        start = _pile(rng, names)
        problem = _problem(names, start, _wander(rng, start, steps // 2))
        if problem.goal and estimate(problem.init, problem.goal) <= steps:
            plan = shortest_plan(problem, steps)
            if plan is not None and len(plan) == steps:
                return problem
    raise TaskError(f"no problem of {blocks} blocks and {steps} steps found with seed {seed}: give another seed")


def _pile(rng: random.Random, names: Sequence[str]) -> dict[str, str]:
    """Place the blocks in random order, each on the table or on a clear block."""
    on: dict[str, str] = {}
    for name in rng.sample(names, len(names)):
        on[name] = rng.choice([TABLE, *sorted(on.keys() - on.values())])
    return on


def _wander(rng: random.Random, start: dict[str, str], moves: int) -> dict[str, str]:
    """Return the places of the blocks after random moves, preferring clear blocks that have not moved."""
    on, fresh = dict(start), set(start)
    for _ in range(moves):
        clear = sorted(on.keys() - on.values())
        block = rng.choice([name for name in clear if name in fresh] or clear)
        fresh.discard(block)
        on[block] = rng.choice([place for place in (*clear, TABLE) if place not in (block, on[block])] or [TABLE])
    return on


def _problem(names: Sequence[str], start: dict[str, str], goal: dict[str, str]) -> Problem:
    init: set[Fact] = {("on", x, y) if y else ("ontable", x) for x, y in start.items()}
    init.update(("clear", x) for x in start.keys() - set(start.values()))
    return Problem(
        tuple(names), frozenset({*init, ("handempty",)}), frozenset(("on", x, y) for x, y in goal.items() if y)
    )
