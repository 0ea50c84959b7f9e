"""A search driven with ask and tell: its steps, added thoughts, and errors of a task.

Thoughts are letters; a path of them reads "a/b".
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import pytest

from tot import BFS, DFS, MCTS, BestFirst, Evaluate, Expand, SearchState, SelfConsistency, State, Task, Thought
from tot.decoders import TaskError, Usage
from tot.llm.replies import Proposal
from tot.search import base


class Paths(Task):
    """A state is its path; one that ends in "!" is terminal, and a goal if it ends in "!!"."""

    depth = 3

    def is_terminal(self, state: State) -> bool:
        return state.text.endswith("!")

    def is_goal(self, state: State) -> bool:
        return state.text.endswith("!!")


class Places(Task):
    """A state is the place that the last thought leads to: its text after the last "-"."""

    depth = 9
    end: ClassVar[str] = "goal"

    def start(self, question: str) -> State:
        return super().start(question).model_copy(update={"world": "start"})

    def step(self, state: State, thought: Thought) -> State:
        return state.then(thought, thought.text.rpartition("-")[2])

    def cost(self, state: State, thought: Thought) -> float:
        return float(thought.text.split("-")[0]) if "-" in thought.text else 1.0

    def is_terminal(self, state: State) -> bool:
        return state.world == self.end


@pytest.fixture
def drive() -> Callable[..., list[str]]:
    """Answer every step from tables of children and values by path; return the steps."""

    def run(search: SearchState, children: dict[str, Any], value: dict[str, float] | None = None) -> list[str]:
        requests = []
        while (step := search.ask()) is not None:
            at = ["/".join(thought.text for thought in state.thoughts) for state in step.states]
            requests.append(f"{type(step).__name__.lower()} {' '.join(at)}".strip())
            search.tell(
                [children.get(path, ()) for path in at]
                if isinstance(step, Expand)
                else [None if value is None else value[path] for path in at]
            )
        return requests

    return run


def texts(nodes: Sequence[Any]) -> list[str]:
    return [node.thought.text for node in nodes if node.thought]


# -- ask and tell -----------------------------------------------------------------------------------------------


def test_steps_are_in_order_and_have_nodes_states_and_count() -> None:
    search = BFS(thoughts=4, breadth=1).start(Paths(), "q")
    first = search.ask()
    assert isinstance(first, Expand)
    assert (first.nodes, first.states, first.count, first.whole) == (
        (search.tree.root,),
        (State(question="q"),),
        4,
        False,
    )
    a, b = search.tell([["a", "b"]])
    second = search.ask()
    assert isinstance(second, Evaluate)
    assert second.nodes == (a, b)
    assert [state.text for state in second.states] == ["a", "b"]
    assert not second.fast
    assert search.tell([3, 5.5]) == [a, b]
    assert (a.value, b.value, search.best) == (3, 5.5, search.tree.root)  # `best` changes at the next ask()
    third = search.ask()
    assert isinstance(third, Expand)
    assert (third.nodes, search.best) == ((b,), b)


def test_ask_repeats_a_step_until_tell_and_returns_none_after_the_end() -> None:
    search = BFS(depth=2).start(Paths(), "q")
    assert search.ask() is search.ask() is not None
    search.tell([["a"]])
    assert search.ask() is search.ask() is not None
    search.tell([1.0])
    assert [search.ask(), search.ask()] == [None, None]
    with pytest.raises(TaskError, match=r"there is no current step: call ask\(\) before tell\(\)"):
        search.tell([])


def test_tell_accepts_texts_thoughts_and_proposals() -> None:
    search = BFS().start(Paths(), "q")
    search.ask()
    draft = Proposal(Thought(parts={"thought": "c"}), Usage(new_tokens=7), prior=0.25, confidence=0.5, decoder="hand")
    nodes = search.tell([["a", Thought(parts={"thought": "b"}), draft, Proposal(None, Usage(new_tokens=2), 3)]])
    assert texts(nodes) == ["a", "b", "c"]
    assert (nodes[2].usage.new_tokens, nodes[2].prior, nodes[2].confidence, nodes[2].decoder) == (7, 0.25, 0.5, "hand")
    assert (search.tree.root.parse_failures, search.tree.root.usage.new_tokens, search.tree.root.rejected) == (3, 2, 0)


@pytest.mark.parametrize("results", [[], [["a"], ["b"]]])
def test_a_wrong_number_of_results_is_rejected_and_the_step_remains(results: list[Any]) -> None:
    search = BFS().start(Paths(), "q")
    step = search.ask()
    with pytest.raises(TaskError, match=f"{len(results)} results for 1 nodes: pass one per node, in order"):
        search.tell(results)
    assert search.ask() is step
    assert len(search.tree) == 1


def test_an_injected_thought_is_an_ordinary_child(drive: Any) -> None:
    search = DFS(thoughts=1).start(Paths(), "q")
    node = search.inject(search.tree.root, "mine!!")
    assert node is not None
    assert (node.parent, node.depth, node.terminal, node.goal, search.goals) == (0, 1, True, True, [node])
    assert search.inject(search.tree.root, Thought(parts={"thought": "mine!!"})) is None
    assert node.merged == 1
    refusing = type("Refusing", (Paths,), {"step": lambda self, state, thought: None})()
    other = DFS().start(refusing, "q")
    assert other.inject(other.tree.root, "mine") is None
    assert (len(other.tree), other.tree.root.rejected) == (1, 1)


# -- empty searches ---------------------------------------------------------------------------------------------

PLAIN = [BFS(), DFS(), BestFirst(rank="value"), MCTS()]


@pytest.mark.parametrize("search", PLAIN, ids=repr)
def test_a_goal_at_the_root_ends_the_search_without_a_step(search: Any) -> None:
    search = search.start(type("There", (Places,), {"end": "start"})(), "q")
    assert search.ask() is None
    assert (search.best, search.goals, search.stopped) == (search.tree.root, [search.tree.root], None)


@pytest.mark.parametrize("search", PLAIN, ids=repr)
def test_without_actions_the_search_ends_at_the_root_with_a_reason(search: Any, drive: Any) -> None:
    search = search.start(Places(), "q")
    assert drive(search, {}) == ["expand"]
    assert (search.best, len(search.tree)) == (search.tree.root, 1)
    assert search.stopped in (
        "no goal among 0 thoughts",
        "no goal: the queue is empty after 0 thoughts",
        "no terminal state was reached in 0 iterations",
    )


def test_a_depth_without_thoughts_is_reported_once(caplog: pytest.LogCaptureFixture) -> None:
    base._warn_of_depth.cache_clear()
    for _ in range(2):
        BFS(depth=1).start(Task(), "q")
    BFS(depth=2).start(Task(), "q")
    SelfConsistency(depth=1).start(Task(), "q")
    assert [record.message.partition(":")[0] for record in caplog.records] == ["depth 1 has no level of thoughts"]


# -- forks ------------------------------------------------------------------------------------------------------


class Forking(BFS):
    """Grow a child of the root in each of three branches; the branch of `last` returns True after a second level."""

    last: str = ""

    def steps(self, search: SearchState) -> Any:
        yield search.fork(*(self._branch(search) for _ in range(3)))
        search.best = (yield search.expand([search.tree.root], 1))[0]

    def _branch(self, search: SearchState) -> Any:
        (child,) = yield search.expand([search.tree.root], 1)
        yield search.fork(self._deeper(search, child))
        return texts([child]) == [self.last]

    def _deeper(self, search: SearchState, node: Any) -> Any:
        yield search.expand([node], 1)


def test_a_fork_ends_with_its_last_branch_and_the_search_continues(drive: Any) -> None:
    search = Forking().start(Paths(), "q")
    assert len(search.pending()) == 3
    for step, text in zip(search.pending(), "abc", strict=True):
        search.tell([[text]], step=step)
    assert [step.nodes[0].depth for step in search.pending()] == [1, 1, 1]
    assert drive(search, {"a": ["d"], "b": ["d"], "c": ["d"], "": ["e"]}) == [
        "expand a",
        "expand b",
        "expand c",
        "expand",
    ]
    assert search.tree.state(search.best).text == "e"


def test_a_branch_that_returns_true_cancels_the_others_of_its_fork(drive: Any) -> None:
    search = Forking(last="b").start(Paths(), "q")
    for step, text in zip(search.pending(), "abc", strict=True):
        search.tell([[text]], step=step)
    second = search.pending()[1]
    search.tell([["d"]], step=second)
    (step,) = search.pending()  # the requests after a and c are dropped
    assert step.nodes == (search.tree.root,)
    assert drive(search, {"": ["e"]}) == ["expand"]
    assert texts(list(search.tree)) == ["a", "b", "c", "d", "e"]
