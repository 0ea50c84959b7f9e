"""Selection in breadth-first search: the best states or a sample by value, compared with ToT's published loop.

Thoughts are letters; a path of them reads "ab".
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import permutations
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tot import BFS, Expand, Node, SearchState, Task, Thought

Children = Callable[[str], Sequence[str]]
Values = Callable[[str], float | None]


class Letters(Task):
    """Any letters; only states at full depth are terminal."""

    depth = 2


def path(search: SearchState, node: Node) -> str:
    return "".join(thought.text for thought in search.tree.state(node).thoughts)


def kept_by(search: BFS, children: Children, value: Values, seed: int = 0) -> tuple[list[list[str]], str]:
    """Return the states selected at every level, and the state at which the answer is asked."""
    levels: list[list[str]] = []

    def listen(search: SearchState, nodes: list[Node]) -> None:
        levels.append([path(search, node) for node in nodes])

    search = search.start(Letters(), "q", seed=seed, hooks={"on_level": listen})
    while (step := search.ask()) is not None:
        at = [path(search, node) for node in step.nodes]
        search.tell([list(children(p)) if isinstance(step, Expand) else value(p) for p in at])
    return levels, path(search, search.best)


def one_level(search: BFS, values: dict[str, float | None], seed: int = 0) -> list[str]:
    return kept_by(search, lambda _: list(values), lambda p: values[p], seed)[0][0]


# -- sampling ---------------------------------------------------------------------------------------------------


def sample_levels(values: dict[str, float | None], breadth: int, times: int) -> Counter[tuple[str, ...]]:
    search = BFS(breadth=breadth, select="sample")
    return Counter(tuple(one_level(search, values, seed)) for seed in range(times))


def test_samples_are_weighted_by_value_without_replacement() -> None:
    """The first is x with probability v_x / 8, the second y with v_y / (8 - v_x)."""
    values = {"a": 1.0, "b": 2.0, "c": 5.0}
    times = 2000
    counts = sample_levels(dict(values), 2, times)
    expected = {(x, y): times * values[x] / 8 * values[y] / (8 - values[x]) for x, y in permutations("abc", 2)}
    assert sum(expected.values()) == pytest.approx(times)
    assert set(counts) <= set(expected)
    chi_square = sum((counts[pair] - wanted) ** 2 / wanted for pair, wanted in expected.items())
    assert chi_square < 20.5  # 5 degrees of freedom: passed by chance 999 times in 1000


# -- all --------------------------------------------------------------------------------------------------------


@given(st.data(), st.integers(1, 3), st.integers(1, 7))
def test_the_tree_does_not_depend_on_the_order_in_which_branches_are_told(
    data: Any, thoughts: int, breadth: int
) -> None:
    def grown(choose: Callable[[int], int]) -> tuple[dict[str, str], str, list[str]]:
        search = BFS(thoughts=thoughts, breadth=breadth, select="all", depth=5).start(Letters(), "q")
        while steps := search.pending():
            step = steps[choose(len(steps))]
            at = [path(search, node) for node in step.nodes]
            children = [
                [Thought(parts={"thought": f"{i}"}, ended=len(p) == 2 and i == 1) for i in range(step.count or 0)]
                for p in at
                if isinstance(step, Expand)
            ]
            search.tell(children or [float(len(p)) for p in at], step=step)
        nodes = {search.tree.place(node): path(search, node) for node in search.tree}
        return nodes, path(search, search.best), [path(search, node) for node in search.complete()]

    expected = grown(lambda _: 0)
    assert len(expected[2]) <= breadth
    assert grown(lambda count: data.draw(st.integers(0, count - 1))) == expected


# -- ToT's published loop ---------------------------------------------------------------------------------------


def published(children: Children, value: Callable[[str], float], levels: int, b: int) -> tuple[list[list[str]], str]:
    """Level by level: propose thoughts after each selected path, drop duplicates, evaluate, select the b best.

    Of equal values the first wins.
    """
    paths, selected = [""], []
    for _ in range(levels):
        new = list(dict.fromkeys(p + thought for p in paths for thought in children(p)))
        if not new:
            break
        values = [value(p) for p in new]
        order = sorted(range(len(new)), key=lambda i: values[i], reverse=True)[:b]
        paths = [new[i] for i in order]
        selected.append(paths)
    return selected, paths[0]


@given(seed=st.integers(0, 10**6), n=st.integers(0, 4), b=st.integers(1, 4), levels=st.integers(0, 4))
def test_selected_states_match_tots_published_loop(seed: int, n: int, b: int, levels: int) -> None:
    """Random trees with duplicates, dead ends and many equal values."""

    def children(p: str) -> list[str]:
        draw = random.Random(f"{seed} children {p}")
        return [draw.choice("abcd") for _ in range(draw.randint(min(n, 1), n))]

    def value(p: str) -> float:
        return random.Random(f"{seed} value {p}").choice([-1.0, 0.5, 1.0, 2.0])

    search = BFS(thoughts=None, breadth=b, depth=levels + 1)
    assert kept_by(search, children, value) == published(children, value, levels, b)


def test_a_merged_state_takes_one_place_of_the_breadth() -> None:
    """A terminal state kept from a level above and reached again at a lower cost is still one state."""

    class Roads(Letters):
        def start(self, question: str) -> Any:
            return super().start(question).model_copy(update={"world": "s"})

        def step(self, state: Any, thought: Thought) -> Any:
            return state.then(thought, thought.text[-1])

        def cost(self, state: Any, thought: Thought) -> float:
            return float(thought.text[0])

        def is_terminal(self, state: Any) -> bool:
            return bool(state.world == "x")

    levels: list[list[Any]] = []
    hooks = {"on_level": lambda search, nodes: levels.append([node.world for node in nodes])}
    search = BFS(breadth=3, depth=4).start(Roads(), "q", hooks=hooks)
    tables = {"s": ["9x", "1y"], "y": ["1x", "1z"]}
    while (step := search.ask()) is not None:
        worlds: list[Any] = [state.world for state in step.states]
        search.tell([tables.get(world, []) if isinstance(step, Expand) else 1 for world in worlds])
    assert levels == [["x", "y"], ["x", "z"]]
