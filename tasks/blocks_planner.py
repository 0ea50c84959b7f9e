"""Plans for Blocksworld, shortest ones and plain ones; the estimate that A* goes by; and problems of a wanted length.

It finds what a search over thoughts is measured against, and is never shown to one. Knows nothing of tasks or models.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Sequence
from functools import lru_cache

from tot.decoders.errors import TaskError
from tot.tasks.blocks import TABLE, Action, Facts, apply, legal_actions, places
from tot.tasks.pddl import Fact, Problem

_TRIES = 5_000
"""Chance problems looked at for one of a wanted length."""


def shortest_plan(problem: Problem, limit: int | None = None) -> list[str] | None:
    """A plan of the fewest steps, as PDDL, found breadth first, so for few blocks; None where none of at most `limit`
    steps reaches the goal."""
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
    """Steps that reaching a goal takes at least: exact often, and it falls by at most 1 a step (it is consistent).

    A block that has to move is picked up and put somewhere, twice if something under it has to move in between.
    """
    on, (wanted, supports) = places(facts), _wanted(goal)
    moving = _moving(on, goal)
    held = next((fact[1] for fact in facts if fact[0] == "holding"), None)
    kept = next((fact[1] for fact in goal if fact[0] == "holding"), None)
    total = 0
    for block in moving:
        under = set()
        below = on[block]
        while below:
            if below in moving:
                under.add(below)
            below = on.get(below, TABLE)
        if block == kept:
            total += 3 if under else 1
        else:
            total += 2 if under.isdisjoint(supports.get(block, ())) else 4
    if held is not None and held == kept:
        total += 2 if moving else 0
    elif held is not None:
        place = wanted.get(held, TABLE)
        total += 1 if not place or (("clear", place) in facts and place not in moving) else 3
    # Where the goal doesn't care, the last block may stay in the hand.
    if kept is None and ("handempty",) not in goal:
        named = {block for fact in goal for block in fact[1:]}
        total -= any(block not in named for block in ({*moving, held} - {None}))
    return total


def _moving(on: dict[str, str], goal: Facts) -> set[str]:
    """The blocks that have to be picked up, now or later."""
    wanted = _wanted(goal)[0]
    freed = {place for block, place in wanted.items() if on.get(block) != place} - {TABLE}
    freed.update(fact[1] for fact in goal if fact[0] == "clear")
    moving = {x for x, y in on.items() if wanted.get(x, y) != y or y in freed or ("holding", x) in goal}
    above = {y: x for x, y in on.items() if y}
    for block in list(moving):
        over = above.get(block)
        while over is not None and over not in moving:
            moving.add(over)
            over = above.get(over)
    return moving


@lru_cache(maxsize=256)
def _wanted(goal: Facts) -> tuple[dict[str, str], dict[str, frozenset[str]]]:
    """What a goal wants each block to stand on, and all blocks that have to be under it then."""
    wanted = places(goal)
    supports = {}
    for block in wanted:
        under: list[str] = []
        place = wanted[block]
        while place and place not in under:
            under.append(place)
            place = wanted.get(place, TABLE)
        supports[block] = frozenset(under)
    return wanted, supports


def plain_plan(problem: Problem) -> list[str]:
    """The plan of a beginner, as PDDL, the same for the same problem, of which the goal can be reached.

    All blocks are put on the table, pile by pile and from the top, then the goal is built from the bottom. What comes
    first in the alphabet goes first. Nothing is looked for, so it is easier to learn than a shortest plan.
    """
    if problem.goal <= problem.init:
        return []
    under, wanted = places(problem.init), places(problem.goal)
    plan = [Action("put-down", (fact[1],)) for fact in problem.init if fact[0] == "holding"]
    for block in sorted(under.keys() - under.values()):
        while (below := under[block]) != TABLE:
            plan += [Action("unstack", (block, below)), Action("put-down", (block,))]
            block = below
    waiting = sorted(block for block, below in wanted.items() if below != TABLE)
    while waiting:
        block = next(block for block in waiting if wanted[block] not in waiting)
        waiting.remove(block)
        plan += [Action("pick-up", (block,)), Action("stack", (block, wanted[block]))]
    plan += [Action("pick-up", (fact[1],)) for fact in problem.goal if fact[0] == "holding"]
    return [action.pddl for action in plan]


def generate(seed: int, blocks: int, steps: int) -> Problem:
    """A problem of 2 to 6 blocks whose shortest plan has `steps` steps.

    Each move is a pick and a put, and 4 * (blocks - 1) steps are enough for any goal, so `steps` is even and at most
    that. The goal says what stands on what. Equal arguments give equal problems. Raises TaskError for other numbers,
    and where chance finds none.
    """
    if not 2 <= blocks <= 6:
        raise TaskError(f"blocks={blocks}: give from 2 to 6")
    most = 4 * (blocks - 1)
    if steps not in range(2, most + 1, 2):
        raise TaskError(f"no problem of {blocks} blocks takes {steps} steps: give an even number from 2 to {most}")
    rng = random.Random(f"{seed} {blocks} {steps}")
    names = [chr(ord("a") + index) for index in range(blocks)]
    for _ in range(_TRIES):
        start = _pile(rng, names)
        problem = _problem(names, start, _wander(rng, start, steps // 2))
        if problem.goal and estimate(problem.init, problem.goal) <= steps:
            plan = shortest_plan(problem, steps)
            if plan is not None and len(plan) == steps:
                return problem
    raise TaskError(f"no problem of {blocks} blocks and {steps} steps came of seed {seed}: give another seed")


def _pile(rng: random.Random, names: Sequence[str]) -> dict[str, str]:
    """Blocks put down one by one, each on the table or on a block that is clear."""
    on: dict[str, str] = {}
    for name in rng.sample(names, len(names)):
        on[name] = rng.choice([TABLE, *sorted(on.keys() - on.values())])
    return on


def _wander(rng: random.Random, start: dict[str, str], moves: int) -> dict[str, str]:
    """Where blocks are after some moves, each of a clear block that has not moved, while there is one."""
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
