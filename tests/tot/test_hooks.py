"""Hooks: events of a search, their nodes, and how a hook can change the search."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tot import BFS, DFS, MCTS, BestFirst, BestOfN, ChainOfThought, Expand, Node, SearchState, State, Task, Thought
from tot.decoders import OptionError

CHILDREN = {"": ["a", "b"], "a": ["e", "f"], "b": ["c!!", "d"]}
VALUES = {"a": 1, "b": 2, "a/e": 1, "a/f": 1, "b/c!!": 5, "b/d": 3, "mine": 9}
EVENTS = ("on_select", "on_expand", "on_evaluate", "on_level", "on_goal")


class Paths(Task):
    """A state is its path; one that ends in "!" is terminal, and a goal if it ends in "!!"."""

    depth = 3

    def is_terminal(self, state: State) -> bool:
        return state.text.endswith("!")

    def is_goal(self, state: State) -> bool:
        return state.text.endswith("!!")


def path(search: SearchState, node: Node) -> str:
    return "/".join(thought.text for thought in search.tree.state(node).thoughts)


@pytest.fixture
def drive() -> Callable[..., list[str]]:
    """Answer every step from CHILDREN and VALUES; return the steps."""

    def run(search: SearchState) -> list[str]:
        requests = []
        while (step := search.ask()) is not None:
            at = [path(search, node) for node in step.nodes]
            requests.append(" ".join([type(step).__name__.lower(), *filter(None, at)]))
            if isinstance(step, Expand) and step.whole:
                search.tell([[Thought(parts={"chain": "b"}), Thought(parts={"chain": "a"})]])
            else:
                search.tell([CHILDREN.get(p, []) if isinstance(step, Expand) else VALUES[p] for p in at])
        return requests

    return run


# -- events -----------------------------------------------------------------------------------------------------

FIRST = ["select ", "expand a b", "evaluate a b"]
SECOND = ["select b", "goal b/c!!", "expand b/c!! b/d", "evaluate b/c!! b/d"]


@pytest.mark.parametrize(
    ("search", "heard"),
    [
        (BFS(breadth=1), [*FIRST, "level b", *SECOND, "level b/c!!"]),
        (DFS(), [*FIRST, *SECOND]),
        (BestFirst(rank="value"), [*FIRST, *SECOND]),
        (MCTS(iterations=2), [*FIRST, *SECOND]),
        (ChainOfThought(), ["select ", "expand b a"]),
        (BestOfN(), ["select ", "expand b a", "evaluate b a"]),
    ],
    ids=repr,
)
def test_every_event_is_sent_with_its_nodes_in_order(search: Any, heard: list[str], drive: Any) -> None:
    messages: list[str] = []

    def listen(event: str) -> Callable[[SearchState, list[Node]], None]:
        def hook(search: SearchState, nodes: list[Node]) -> None:
            messages.append(f"{event.removeprefix('on_')} {' '.join(path(search, node) for node in nodes)}")

        return hook

    drive(search.start(Paths(), "q", hooks={event: listen(event) for event in EVENTS}))
    assert messages == heard


# -- effects of a hook ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("event", "requests"),
    [
        ("on_select", []),
        ("on_expand", ["expand"]),
        ("on_evaluate", ["expand", "evaluate a b"]),
        ("on_level", ["expand", "evaluate a b"]),
    ],
)
def test_a_hook_can_stop_the_search(event: str, requests: list[str], drive: Any) -> None:
    search = BFS(breadth=1).start(Paths(), "q", hooks={event: lambda search, nodes: search.stop("seen enough")})
    assert drive(search) == requests
    assert search.stopped == "seen enough"


@pytest.mark.parametrize(
    ("event", "requests"),
    [
        ("on_expand", ["expand", "evaluate a", "expand a", "evaluate a/e a/f"]),
        ("on_evaluate", ["expand", "evaluate a b", "expand a", "evaluate a/e a/f"]),
        ("on_level", ["expand", "evaluate a b", "expand a", "evaluate a/e a/f"]),
        ("on_select", ["expand", "evaluate a b", "expand a", "evaluate a/e a/f"]),
    ],
)
def test_nodes_that_a_hook_omits_are_pruned(event: str, requests: list[str], drive: Any) -> None:
    def without_b(search: SearchState, nodes: list[Node]) -> list[Node]:
        return [node for node in nodes if not path(search, node).startswith("b")]

    search = BFS(breadth=2).start(Paths(), "q", hooks={event: without_b})
    assert drive(search) == requests
    assert [path(search, node) for node in search.tree if node.pruned] == ["b"]


def test_a_hook_can_add_a_thought(drive: Any) -> None:
    def add(search: SearchState, nodes: list[Node]) -> list[Node] | None:
        mine = search.inject(search.tree.root, "mine") if nodes[0].depth == 1 else None
        return [*nodes, mine] if mine is not None else None

    search = BFS(breadth=1).start(Paths(), "q", hooks={"on_expand": add})
    assert drive(search) == ["expand", "evaluate a b mine", "expand mine"]
    assert path(search, search.best) == "mine"


def test_a_goal_that_a_hook_rejects_does_not_end_the_search(drive: Any) -> None:
    search = DFS().start(Paths(), "q", hooks={"on_goal": lambda search, nodes: []})
    assert drive(search)[-2:] == ["expand a", "evaluate a/e a/f"]
    assert (search.goals, [node.goal for node in search.tree]) == ([], [False] * 7)
    assert search.stopped == "no goal among 6 thoughts"
    whole = DFS().start(Paths(), "q", hooks={"on_goal": lambda search, nodes: nodes})
    drive(whole)
    assert [path(whole, node) for node in whole.goals] == ["b/c!!"]


# -- invalid hooks ----------------------------------------------------------------------------------------------


class Misnamed:
    def on_expnd(self, search: SearchState, nodes: list[Node]) -> None: ...


class NotAMethod:
    on_goal = True


@pytest.mark.parametrize(
    ("hooks", "message"),
    [
        (
            {"on_expnd": print},
            r"unknown hook 'on_expnd' \(did you mean on_expand\?\): choose one of on_evaluate, ",
        ),
        (Misnamed(), r"unknown hook 'on_expnd' \(did you mean on_expand\?\)"),
        ({3: print}, "unknown hook"),
        ({"on_expand": 3}, r"hook on_expand = 3 can't be called: pass a function of \(search, nodes\)"),
        (NotAMethod(), "hook on_goal = True can't be called"),
        (print, "has none of the methods on_select, on_expand, .*: define at least one"),
        ([print], "has none of the methods"),
        (3, "hooks=3 has none of the methods"),
    ],
)
def test_an_invalid_hook_is_rejected_when_the_search_starts(hooks: Any, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        BFS().start(Paths(), "q", hooks=hooks)
