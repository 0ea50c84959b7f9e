"""Monte Carlo tree search: selection and backpropagation, against values by hand and a second UCT implementation.

Thoughts are letters; a path of them reads "ab". States at full depth are terminal.
"""

from __future__ import annotations

import math
import random
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tot import MCTS, Expand, Node, SearchState, Task, Thought
from tot.llm.replies import Proposal
from tot.search.mcts import _Statistics


class Letters(Task):
    depth = 3


def path(search: SearchState, node: Node) -> str:
    return "".join(thought.text for thought in search.tree.state(node).thoughts)


Drive = Callable[..., SearchState]


@pytest.fixture(scope="module")
def drive() -> Drive:
    """Run a search on tables by path."""

    def run(options: MCTS, children: Any, value: Any, task: Task | None = None) -> SearchState:
        search = options.start(task or Letters(), "q")
        while (step := search.ask()) is not None:
            at = [path(search, node) for node in step.nodes]
            search.tell([children(p) if isinstance(step, Expand) else value(p) for p in at])
        return search

    return run


@pytest.fixture(autouse=True)
def _endless(monkeypatch: pytest.MonkeyPatch) -> None:
    """Continue after every state has been visited: the trees of these tests are small."""
    monkeypatch.setattr(_Statistics, "is_exhausted", lambda run: not run.children[0])


def learnt(search: SearchState) -> dict[str, tuple[int, float | None]]:
    return {path(search, node): (node.visits, node.q) for node in search.tree if node.visits}


# -- by hand ----------------------------------------------------------------------------------------------------


CHAIN: tuple[Any, Any] = (lambda p: {"": ["a"], "a": ["b"]}.get(p, []), lambda p: {"a": 3.0, "ab": 5.0}[p])


def test_the_reward_of_a_state_is_its_value_plus_the_reward_of_the_task(drive: Drive) -> None:
    task = type("Rewarding", (Letters,), {"reward": lambda self, state: 100.0 * (state.text == "a\nb")})()
    search = drive(MCTS(iterations=2, cum_reward="sum"), *CHAIN, task)
    assert [node.reward for node in search.tree] == [None, 3, 105]
    assert learnt(search) == {"": (2, (3 + 108) / 2), "a": (2, (3 + 108) / 2), "ab": (1, 105)}


# -- a second UCT -----------------------------------------------------------------------------------------------


def reference(
    children: Callable[[str], Sequence[str]],
    value: Callable[[str], float],
    iterations: int,
    levels: int,
    *,
    weight: float,
    fast: bool,
    cumulate: Callable[[list[float]], float],
    q_of: Callable[[list[float]], float],
    prior: Callable[[str], float] | None,
) -> dict[str, tuple[int, float]]:
    """UCT, or PUCT with priors, in minimal form: return visits and Q of every visited state."""
    visits: dict[str, int] = defaultdict(int)
    returns: dict[str, list[float]] = defaultdict(list)
    grown = {""}

    def score(parent: str, child: str) -> float:
        above, n = max(visits[parent], 1), visits[child]
        if n:
            q = q_of(returns[child])
        elif fast:
            q = value(child)
        elif prior is None:
            return math.inf
        else:
            q = q_of(returns[parent]) if returns[parent] else 0.0
        if prior is not None:
            return q + weight * prior(child) * above**0.5 / (1 + n)
        return q + weight * (math.log(above) / max(n, 1)) ** 0.5

    for _ in range(iterations):
        walk = [""]
        while True:
            here = walk[-1]
            if here and visits[here] and here not in grown and len(here) < levels:
                grown.add(here)
            elif here not in grown:
                break
            if not children(here):
                break
            walk.append(max((here + c for c in children(here)), key=lambda child: score(walk[-1], child)))
        rewards = [value(state) for state in walk[1:]]
        for i, state in enumerate(walk):
            returns[state].append(cumulate(rewards[max(i - 1, 0) :]))
            visits[state] += 1
    return {state: (visits[state], q_of(returns[state])) for state in visits if visits[state]}


def mean(numbers: list[float]) -> float:
    return sum(numbers) / len(numbers)


@given(
    seed=st.integers(0, 10**6),
    fast=st.booleans(),
    puct=st.booleans(),
    cum_reward=st.sampled_from(["sum", "mean"]),
    calc_q=st.sampled_from(["mean", "max"]),
    exploration=st.sampled_from([0.0, 0.7, 1.0, 3.0]),
)
def test_visits_and_q_match_a_second_uct(
    drive: Drive, seed: int, fast: bool, puct: bool, cum_reward: Any, calc_q: Any, exploration: float
) -> None:
    """Random trees of two or three levels, some states without children, for 20 iterations."""
    levels = 2 + seed % 2

    def children(p: str) -> list[str]:
        return list("abcd")[: random.Random(f"{seed} {p}").randint(0 if p else 1, 4)]

    def value(p: str) -> float:
        return random.Random(f"{seed} value {p}").random()

    def weight(p: str) -> float:
        return random.Random(f"{seed} prior {p}").random()

    def drafts(p: str) -> list[Proposal]:
        return [Proposal(Thought(parts={"thought": c}), prior=weight(p + c)) for c in children(p)]

    options = MCTS(
        depth=levels + 1,
        iterations=20,
        fast="evaluator" if fast else None,
        rule="puct" if puct else "uct",
        cum_reward=cum_reward,
        calc_q=calc_q,
        exploration=exploration,
    )
    search = drive(options, drafts, value)
    wanted = reference(
        children,
        value,
        20,
        levels,
        weight=exploration,
        fast=fast,
        cumulate={"sum": sum, "mean": mean}[cum_reward],
        q_of={"mean": mean, "max": max}[calc_q],
        prior=weight if puct else None,
    )
    result = learnt(search)
    assert search.tree.root.visits == 20
    assert {state: stats[0] for state, stats in result.items()} == {state: stats[0] for state, stats in wanted.items()}
    assert {s: stats[1] for s, stats in result.items()} == pytest.approx({s: stats[1] for s, stats in wanted.items()})
