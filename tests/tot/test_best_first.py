"""Best-first search: A*, by value, and by prior, on graphs solved by hand and random graphs.

The roads of a place are thoughts: "b" leads to the place b, at the cost that the map gives.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Callable, Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tot import BestFirst, Expand, SearchState, State, Task, Thought
from tot.decoders import OptionError
from tot.llm.replies import Proposal

Map = Mapping[str, Mapping[str, float]]
HILLS: Map = {"s": {"a": 1, "b": 4}, "a": {"b": 2, "c": 5, "g": 12}, "b": {"c": 2}, "c": {"g": 3}}
AHEAD = {"s": 7.0, "a": 6.0, "b": 4.0, "c": 2.0, "g": 0.0}


class Roads(Task):
    """A route from s to g."""

    depth = 2  # not a limit for these searches, since the task has terminal states

    def __init__(self, roads: Map, ahead: Mapping[str, float]) -> None:
        super().__init__()
        self.roads, self.ahead = roads, ahead

    def start(self, question: str) -> State:
        return State(question=question, world="s")

    def actions(self, state: State) -> list[str]:
        return list(self.roads.get(str(state.world), {}))

    def step(self, state: State, thought: Thought) -> State:
        return state.then(thought, thought.text)

    def cost(self, state: State, thought: Thought) -> float:
        return self.roads[str(state.world)][thought.text]

    def heuristic(self, state: State) -> float:
        return self.ahead[str(state.world)]

    def is_terminal(self, state: State) -> bool:
        return state.world == "g"


def ride(search: SearchState, max_steps: int = 10_000) -> list[str]:
    """Expand all roads; return the expanded places, one text a step."""
    expanded: list[str] = []
    while (step := search.ask()) is not None:
        assert isinstance(step, Expand)
        assert step.count is None
        assert len(expanded) < max_steps
        expanded.append("".join(str(state.world) for state in step.states))
        search.tell([search.task.actions(state) for state in step.states])
    return expanded


def route(search: SearchState) -> str:
    return "s" + "".join(thought.text for thought in search.tree.state(search.best).thoughts)


def length(roads: Map, path: str) -> float:
    return sum(roads[a][b] for a, b in itertools.pairwise(path))


# -- A* ---------------------------------------------------------------------------------------------------------


def cheapest(roads: Map, start: str) -> float:
    done: set[str] = set()
    queue = [(0.0, start)]
    while queue:
        cost, place = heapq.heappop(queue)
        if place == "g":
            return cost
        if place not in done:
            done.add(place)
            for other, more in roads.get(place, {}).items():
                heapq.heappush(queue, (cost + more, other))
    return float("inf")


@given(seed=st.integers(0, 10**6), batch=st.integers(1, 3))
def test_the_path_is_the_cheapest_on_any_map_with_any_admissible_estimate(seed: int, batch: int) -> None:
    draw = random.Random(seed)
    places = "sabcdeg"
    roads = {a: {b: float(draw.randint(0, 9)) for b in places if b != a and draw.random() < 0.45} for a in places}
    true = {place: cheapest(roads, place) for place in places}
    ahead = {place: draw.choice([0.0, 0.5, 1.0]) * min(true[place], 30.0) for place in places}
    search = BestFirst(batch=batch).start(Roads(roads, ahead), "q")
    ride(search)
    if true["s"] == float("inf"):
        assert search.stopped == f"no goal: the queue is empty after {len(search.tree) - 1} thoughts"
    else:
        assert length(roads, route(search)) == search.best.cost == true["s"]
        assert search.stopped is None


def test_without_a_given_depth_only_terminal_states_end_a_path() -> None:
    search = BestFirst(depth=3).start(Roads(HILLS, AHEAD), "q")
    ride(search)
    assert (route(search), search.best.cost) == ("sag", 13)


# -- by value, by prior -----------------------------------------------------------------------------------------


class Paths(Task):
    """A state is its path; one that ends in "!" is terminal."""

    def is_terminal(self, state: State) -> bool:
        return state.text.endswith("!")


@pytest.fixture
def drive() -> Callable[..., list[str]]:
    """Answer every step from tables by path; return the expanded paths, one text a step."""

    def run(search: SearchState, children: Mapping[str, Any], value: Mapping[str, float]) -> list[str]:
        expanded = []
        while (step := search.ask()) is not None:
            at = ["/".join(thought.text for thought in state.thoughts) for state in step.states]
            if isinstance(step, Expand):
                expanded.append(" ".join(at))
            search.tell([children.get(p, []) if isinstance(step, Expand) else value[p] for p in at])
        return expanded

    return run


VALUED = {"": ["a", "b"], "a": ["c", "d"], "b": ["e!"], "a/c": ["f"]}
VALUES = {"a": 6, "b": 3, "a/c": 4, "a/d": 2, "a/c/f": 1, "b/e!": 0}


@pytest.mark.parametrize("rank", ["auto", "value"])
def test_the_most_valuable_state_of_the_frontier_is_next(rank: Any, drive: Any) -> None:
    search = BestFirst(rank=rank).start(Paths(), "q")
    assert drive(search, VALUED, VALUES) == ["", "a", "a/c", "b", "a/d", "a/c/f"]
    assert search.tree.state(search.best).text == "b\ne!"  # the lowest value, and still the only goal
    assert search.stopped is None


def priored(**priors: float) -> list[Proposal]:
    return [Proposal(Thought(parts={"thought": text}), prior=prior) for text, prior in priors.items()]


def test_by_prior_depth_over_probability_decides(drive: Any) -> None:
    """a: 1 / 0.76 = 1.3; b: 1 / 0.24 = 4.17; a/c: 2 / (0.76 * 0.6) = 4.39, though likelier than b; a/d: 6.6."""
    search = BestFirst(rank="prior").start(Paths(), "q")
    children = {"": priored(b=0.24, a=0.76), "a": priored(c=0.6, d=0.4)}
    assert drive(search, children, {}) == ["", "a", "b", "a/c", "a/d"]
    assert search.stopped == "no goal: the queue is empty after 4 thoughts"


def test_by_prior_a_thought_without_a_prior_is_rejected() -> None:
    search = BestFirst(rank="prior").start(Paths(), "q")
    search.ask()
    search.tell([["a"]])
    with pytest.raises(OptionError, match=r"rank=prior needs a thought generator that returns priors: use Enumerate"):
        search.ask()
