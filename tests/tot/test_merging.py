"""Thoughts that lead to a known state: among siblings, on the path, or elsewhere in the tree.

A thought such as "2-x" leads to the place x at cost 2; "x" alone costs 1.
"""

from __future__ import annotations

from typing import Any

import pytest

from tot import BFS, DFS, MCTS, BestFirst, Expand, State, Task, Thought


class Places(Task):
    """A state is the place that the last thought leads to: its text after the last "-"."""

    depth = 9

    def start(self, question: str) -> State:
        return super().start(question).model_copy(update={"world": "start"})

    def step(self, state: State, thought: Thought) -> State:
        return state.then(thought, thought.text.rpartition("-")[2])

    def cost(self, state: State, thought: Thought) -> float:
        return float(thought.text.split("-")[0]) if "-" in thought.text else 1.0

    def is_terminal(self, state: State) -> bool:
        return state.world == "goal"


@pytest.mark.parametrize("back", ["start", "x"])
def test_a_thought_that_returns_to_its_own_path_is_dropped(back: str) -> None:
    search = BFS(breadth=1).start(Places(), "q")
    for place, more in (("start", ["x"]), ("x", ["y"]), ("y", [back, "z"])):
        step = search.ask()
        assert isinstance(step, Expand)
        assert step.states[0].world == place
        search.tell([more])
        search.ask()
        search.tell([1])
    assert [node.world for node in search.tree] == ["start", "x", "y", "z"]
    assert [node.rejected for node in search.tree] == [0, 0, 1, 0]


SEARCHES = [
    BFS(thoughts=None, breadth=99, depth=99),
    DFS(thoughts=None, depth=99),
    BestFirst(rank="value"),
    MCTS(thoughts=None, iterations=60, depth=99),
]


@pytest.mark.parametrize("search", SEARCHES, ids=lambda search: type(search).__name__)
def test_every_search_of_a_cyclic_graph_without_a_goal_ends_and_reports_it(search: Any) -> None:
    """Five places, each connected to all and to itself: no path may have a place twice."""
    places = ["start", "v", "w", "x", "y"]
    running = search.start(Places(), "q")
    steps = 0
    while (step := running.ask()) is not None:
        steps += 1
        assert steps < 2000
        running.tell([places if isinstance(step, Expand) else 1.0 for _ in step.nodes])
    simple_paths = 4 + 4 * 3 + 4 * 3 * 2 + 4 * 3 * 2 * 1
    assert len(running.tree) - 1 <= simple_paths
    for node in running.tree:
        worlds = [step.world for step in running.tree.path(node)]
        assert len(set(worlds)) == len(worlds)
    if search.merging:
        assert len([node for node in running.tree if not node.pruned]) == 5
    assert str(running.stopped).startswith("no ")


@pytest.mark.parametrize("way", ["x", "9-x"])
def test_equal_states_are_merged_and_the_other_way_in_is_a_link(way: str) -> None:
    search = BFS().start(Places(), "q")
    search.ask()
    v, w = search.tell([["v", "w"]])
    search.ask()
    search.tell([2, 1])
    search.ask()
    (x,) = search.tell([["x"], [way]])
    assert (x.parent, x.merged, x.cost) == (v.id, 1, 2)
    assert [(tail.id, head.id, thought.text) for tail, head, thought in search.tree.links()] == [(w.id, x.id, way)]


def test_a_cheaper_way_to_a_state_replaces_its_node() -> None:
    search = BFS().start(Places(), "q")
    search.ask()
    search.tell([["9-v", "1-w"]])
    search.ask()
    search.tell([1, 1])
    search.ask()
    (cheap,) = search.tell([["1-x"], ["2-x"]])
    assert [(node.cost, node.pruned) for node in search.tree if node.world == "x"] == [(10, True), (3, False)]
    assert search.tree.state(cheap).text == "1-w\n2-x"


def test_states_are_merged_only_in_a_world() -> None:
    searches = (BFS(), DFS(), BestFirst(), MCTS())
    assert [search.merges(State(question="q", world=0)) for search in searches] == [True, True, True, False]
    assert not any(search.merges(State(question="q")) for search in searches)
