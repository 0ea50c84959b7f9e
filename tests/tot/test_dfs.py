"""Depth-first search (ToT, Algorithm 2) on trees solved by hand.

Thoughts are letters; a path of them reads "a/b". A path that ends in "!" is a goal, in "?" terminal but not a goal.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest

from tot import DFS, Expand, Node, SearchState, State, Task, Thought

CHILDREN = {"": ["a", "b", "c"], "a": ["d"], "b": ["e", "f"], "c": ["g"], "b/f": ["h"]}
VALUES = {"a": 5, "b": 7, "c": 6, "a/d": 4, "b/e": 1, "b/f": 8, "c/g": 3, "b/f/h": 2}


class Paths(Task):
    depth = 5

    def is_terminal(self, state: State) -> bool:
        return state.text.endswith(("!", "?"))

    def is_goal(self, state: State) -> bool:
        return state.text.endswith("!")


class Roads(Task):
    """The world is a place, and a thought the name of the next one; "goal" and "other" are goals."""

    depth = 9

    def start(self, question: str) -> State:
        return super().start(question).model_copy(update={"world": "start"})

    def step(self, state: State, thought: Thought) -> State:
        return state.then(thought, thought.text)

    def is_terminal(self, state: State) -> bool:
        return state.world in ("goal", "other")


def path(search: SearchState, node: Node) -> str:
    return "/".join(thought.text for thought in search.tree.state(node).thoughts)


@pytest.fixture
def drive() -> Callable[..., list[str]]:
    """Answer every step from tables by path; return the expanded paths, in order."""

    def run(search: SearchState, children: Mapping[str, list[str]], value: Mapping[str, float | None]) -> list[str]:
        expanded = []
        while (step := search.ask()) is not None:
            at = [path(search, node) for node in step.nodes]
            if isinstance(step, Expand):
                expanded += at
                search.tell([children.get(p, []) for p in at])
            else:
                search.tell([value[p] for p in at])
        return expanded

    return run


def pruned(search: SearchState) -> list[str]:
    return [path(search, node) for node in search.tree if node.pruned]


def test_a_threshold_prunes_children_with_lower_values(drive: Any) -> None:
    search = DFS(threshold=4).start(Paths(), "q")
    assert drive(search, CHILDREN, VALUES) == ["", "b", "b/f", "c", "a", "a/d"]  # a/d is exactly at the threshold
    assert pruned(search) == ["b/e", "b/f/h", "c/g"]
    nothing = DFS(threshold=4).start(Paths(), "q")
    assert drive(nothing, {"": ["a"]}, {"a": None}) == [""]
    assert pruned(nothing) == ["a"]


def test_without_terminal_states_full_depth_is_the_goal(drive: Any) -> None:
    search = DFS().start(type("Plain", (Task,), {"depth": 3})(), "q")
    assert drive(search, CHILDREN, VALUES) == ["", "b"]
    assert (path(search, search.best), search.stopped) == ("b/f", None)


def test_without_a_goal_the_best_state_is_kept_and_reported(drive: Any) -> None:
    search = DFS().start(Paths(), "q")
    drive(search, CHILDREN, VALUES)
    assert (path(search, search.best), search.stopped) == ("b/f", "no goal among 8 thoughts")
    dead = DFS().start(Paths(), "q")
    drive(dead, {"": ["a?", "b"]}, {"a?": 4, "b": 2})
    assert (path(dead, dead.best), dead.stopped) == ("a?", "no goal among 2 thoughts")


def test_a_verified_answer_ends_the_search_before_evaluation() -> None:
    members = {"answer_at": lambda self, state: state.text, "verify": lambda self, question, answer: answer == "a\nx!"}
    search = DFS().start(type("Checked", (Paths,), members)(), "q")
    search.ask()
    search.tell([["a"]])
    search.ask()
    search.tell([1])
    search.ask()
    search.tell([["y!", "x!"]])
    assert search.ask() is None
    assert path(search, search.best) == "a/x!"


# -- merged states ----------------------------------------------------------------------------------------------


@pytest.fixture
def tour() -> Callable[..., list[str]]:
    """Run DFS over places, roads ordered by first letter; return the expanded places."""

    def run(search: SearchState, roads: Mapping[str, list[str]]) -> list[str]:
        expanded: list[str] = []
        while (step := search.ask()) is not None:
            assert len(expanded) < 1000
            worlds = [str(state.world) for state in step.states]
            expanded += worlds if isinstance(step, Expand) else []
            search.tell([roads.get(world, []) if isinstance(step, Expand) else -len(world) for world in worlds])
        return expanded

    return run


def test_a_visited_place_is_not_expanded_again(tour: Any) -> None:
    roads = {"start": ["a", "bb"], "a": ["ccc"], "bb": ["dddd"], "dddd": ["ccc"]}
    assert tour(DFS().start(Roads(), "q"), roads) == ["start", "a", "ccc", "bb", "dddd"]
