"""Monte Carlo tree search: answer selection, rollouts, fast rewards, and stopping."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tot import MCTS, Evaluate, Expand, Node, SearchState, State, Task, Value


class Letters(Task):
    """A path reads "ab"; states at full depth are terminal."""

    depth = 2


class Named(Task):
    """A path that ends in "!" is terminal, and "x!" is a verified answer."""

    depth = 9

    def is_terminal(self, state: State) -> bool:
        return state.text.endswith("!")

    def answer_at(self, state: State) -> str | None:
        return state.thoughts[-1].text if state.thoughts else None

    def verify(self, question: str, answer: Any) -> bool:
        return bool(answer == "x!")


def path(search: SearchState, node: Node) -> str:
    return "".join(thought.text for thought in search.tree.state(node).thoughts)


Drive = Callable[..., tuple[SearchState, list[str]]]


@pytest.fixture
def drive() -> Drive:
    """Run a search on tables by path; return the search and its steps, with "fast" for fast rewards."""

    def run(search: MCTS, children: Any, value: Any, task: Task | None = None) -> tuple[SearchState, list[str]]:
        search = search.start(task or Letters(), "q")
        requests = []
        while (step := search.ask()) is not None:
            at = [path(search, node) for node in step.nodes]
            fast = isinstance(step, Evaluate) and step.fast
            requests.append(" ".join(["fast" if fast else type(step).__name__.lower(), *at]).strip())
            table = children if isinstance(step, Expand) else value
            search.tell([(table(p, fast) if fast else table(p)) for p in at])
        return search, requests

    return run


def visits(search: SearchState) -> dict[str, int]:
    return {path(search, node): node.visits for node in search.tree if node.visits}


# -- depth and terminal states ----------------------------------------------------------------------------------


def test_a_verified_answer_ends_the_search_at_once(drive: Drive) -> None:
    """x! exists from the start, with the lowest value."""
    table = lambda p: [] if p else ["y!", "x!"]  # noqa: E731
    worth = {"y!": 5.0, "x!": 1.0}.__getitem__
    search, requests = drive(MCTS(iterations=6), table, worth, Named())
    assert (path(search, search.best), visits(search)) == ("x!", {})
    assert requests[0] == "expand"
    assert search.stopped is None


# -- rollouts ---------------------------------------------------------------------------------------------------

DEEP = {"": ["a", "b"], "b": ["c", "d"], "bd": ["e", "f"]}
WORTH = {"a": 1.0, "b": 2.0, "bc": 0.0, "bd": 5.0, "bde": 1.0, "bdf": 3.0}


def test_a_greedy_rollout_follows_the_best_child_to_a_terminal_state(drive: Drive) -> None:
    search = MCTS(depth=4, iterations=1, rollout="greedy", cum_reward="sum")
    search, requests = drive(search, lambda p: DEEP[p], lambda p: WORTH[p])
    assert requests == ["expand", "evaluate a b", "expand b", "evaluate bc bd", "expand bd", "evaluate bde bdf"]
    assert visits(search) == {"": 1, "b": 1, "bd": 1, "bdf": 1}
    assert [search.tree[i].q for i in (0, 2)] == [2 + 5 + 3] * 2
    assert (path(search, search.best), search.stopped) == ("bdf", None)


@pytest.mark.parametrize("rollout", ["none", "greedy"])
def test_a_search_ends_once_every_state_has_been_visited(rollout: Any, drive: Drive) -> None:
    mcts = MCTS(depth=4, iterations=10**9, rollout=rollout, exploration=3)
    search, _ = drive(mcts, lambda p: [] if p == "a" else ["a", "b"], lambda p: len(p) + p.count("b") / 10)
    assert {path(search, node) for node in search.tree} == {"", "a", "b", "ba", "bb", "baa", "bab", "bba", "bbb"}
    assert all(node.visits for node in search.tree)
    assert path(search, search.best) == "bbb"
    none, _ = drive(mcts, lambda p: [], lambda p: 1.0)
    assert none.tree.root.visits == 0


# -- fast rewards -----------------------------------------------------------------------------------------------


def test_a_fast_reward_is_q_until_the_evaluator_runs_at_the_visit(drive: Drive) -> None:
    """The fast reward ranks b first; after its visit b has value 0, and a's estimate is better."""
    cheap, true = {"a": 1.0, "b": 2.0}, {"a": 3.0, "b": 0.0}
    search = MCTS(iterations=2, fast=Value(), exploration=0)
    search, requests = drive(search, lambda p: ["a", "b"], lambda p, fast=False: (cheap if fast else true)[p])
    assert requests == ["expand", "fast a b", "evaluate b", "evaluate a"]
    assert [(node.fast, node.value, node.reward, node.q) for node in search.tree][1:] == [(1, 3, 3, 3), (2, 0, 0, 0)]
