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


# -- redundant thoughts -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("back", ["start", "x"])
def test_a_thought_that_returns_to_its_own_path_is_dropped(back: str) -> None:
    search = BFS(merge=False, breadth=1).start(Places(), "q")
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
    BFS(thoughts=None, breadth=99, depth=99, merge=False),
    BFS(thoughts=None, breadth=99, depth=99),
    DFS(thoughts=None, merge=False, depth=99),
    DFS(thoughts=None, depth=99),
    BestFirst(rank="value", merge=False),
    BestFirst(rank="value"),
    MCTS(thoughts=None, iterations=60, depth=99),
]


@pytest.mark.parametrize("search", SEARCHES, ids=repr)
def test_every_search_of_a_cyclic_graph_without_a_goal_ends_and_reports_it(search: Any) -> None:
    """Five places, each connected to all and to itself: no path may have a place twice."""
    places = ["start", "v", "w", "x", "y"]
    search = search.start(Places(), "q")
    steps = 0
    while (step := search.ask()) is not None:
        steps += 1
        assert steps < 2000
        search.tell([places if isinstance(step, Expand) else 1.0 for _ in step.nodes])
    simple_paths = 4 + 4 * 3 + 4 * 3 * 2 + 4 * 3 * 2 * 1
    assert len(search.tree) - 1 <= simple_paths
    for node in search.tree:
        worlds = [step.world for step in search.tree.path(node)]
        assert len(set(worlds)) == len(worlds)
    if getattr(search, "merge", False) is None:
        assert len(search.tree) == 5
    assert search.stopped is not None
    assert search.stopped.startswith("no ")


# -- the graph of thoughts --------------------------------------------------------------------------------------


def test_equal_states_are_merged_and_the_other_way_in_is_a_link() -> None:
    search = BFS(merge=True).start(Places(), "q")
    search.ask()
    v, w = search.tell([["v", "w"]])
    search.ask()
    search.tell([2, 1])
    search.ask()
    (x,) = search.tell([["x"], ["x"]])
    assert (x.parent, x.merged, x.cost) == (v.id, 1, 2)
    assert [(tail.id, head.id, thought.text) for tail, head, thought in search.tree.links()] == [(w.id, x.id, "x")]


def test_a_moved_state_has_the_world_of_its_new_way() -> None:
    """The world also records its path, which the key ignores."""

    def step(self: Task, state: State, thought: Thought) -> State:
        place = thought.text.rpartition("-")[2]
        return state.then(thought, {"place": place, "came": [*(state.world or {}).get("came", ()), thought.text]})  # type: ignore[union-attr,misc,list-item]

    members = {
        "start": lambda self, question: State(question=question, world={"place": "start", "came": []}),
        "step": step,
        "key": lambda self, state: state.world["place"],
        "is_terminal": lambda self, state: False,
    }
    search = BFS(merge=True).start(type("Noting", (Places,), members)(), "q")
    search.ask()
    search.tell([["9-v", "1-w"]])
    search.ask()
    search.tell([1, 1])
    search.ask()
    (x,) = search.tell([["1-x"], ["2-x"]])
    assert [thought.text for thought in search.tree.state(x).thoughts] == ["1-w", "2-x"]
    assert search.tree.state(x).world == {"place": "x", "came": ["1-w", "2-x"]}


def test_merging_is_the_default_only_for_tasks_with_a_world() -> None:
    assert [search().merges(State(question="q", world=0)) for search in (BFS, DFS, BestFirst, MCTS)] == [
        True,
        True,
        True,
        False,
    ]
    assert not any(search().merges(State(question="q")) for search in (BFS, DFS, BestFirst, MCTS))
    assert BFS(merge=True).merges(State(question="q"))
    assert not BFS(merge=False).merges(State(question="q", world=0))
