"""Monte Carlo tree search: where it answers from, rollouts, leaves gathered together, fast rewards, when it stops."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import pytest

from tot import MCTS, Evaluate, Expand, Node, SearchState, State, Task, Value, solve


class Letters(Task):
    """A path reads "ab"; states at full depth are the ends."""

    depth = 2


class Named(Task):
    """One that ends in "!" is the end, and a verified answer where that is "x!"."""

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
    """Runs a search on tables by path; the search, and what was asked, with "fast" for cheap judgements."""

    def run(
        search: MCTS, children: Any, value: Any, task: Task | None = None, seed: int = 0, hooks: Any = None
    ) -> tuple[SearchState, list[str]]:
        search = search.start(task or Letters(), "q", seed=seed, hooks=hooks)
        asked = []
        while (step := search.ask()) is not None:
            at = [path(search, node) for node in step.nodes]
            fast = isinstance(step, Evaluate) and step.fast
            asked.append(" ".join(["fast" if fast else type(step).__name__.lower(), *at]).strip())
            table = children if isinstance(step, Expand) else value
            search.tell([(table(p, fast) if fast else table(p)) for p in at])
        return search, asked

    return run


def visits(search: SearchState) -> dict[str, int]:
    return {path(search, node): node.visits for node in search.tree if node.visits}


# -- where it answers from --------------------------------------------------------------------------------------

DRAWN = [("a", 10), ("b", 6), ("c", 5), ("d", 4.9), ("a", -20), ("b", 5), ("b", 5.3), ("b", 3), ("c", 4.7), ("d", 0)]
"""Ten visits to four arms and what each gave: a the most at once, c the best mean (4.85 against b's 4.825), b the most
visits, d the last. With no exploration each is what the best mean so far leads to."""


@pytest.mark.parametrize(("task", "best"), [(Letters(), "a"), (Named(), "c")], ids=["ends", "no ends"])
def test_it_answers_from_the_end_of_the_highest_reward_and_without_one_from_where_q_leads(
    task: Task, best: str, drive: Drive
) -> None:
    rewards = iter([reward for _, reward in DRAWN for _ in range(2)])  # for the arm, and for the root
    walks: list[str] = []
    search = MCTS(thoughts=None, iterations=10, exploration=0, fast=None, cum_reward=lambda _: next(rewards))
    hooks = {"on_backpropagate": lambda search, nodes: walks.append(path(search, nodes[-1]))}
    search, _ = drive(search, lambda p: [] if p else list("abcd"), lambda p: 0.0, task, hooks=hooks)
    assert walks == [arm for arm, _ in DRAWN]
    assert [search.tree[i].q for i in (1, 2, 3, 4)] == pytest.approx([-5, 4.825, 4.85, 2.45])
    assert path(search, search.best) == best


@pytest.mark.parametrize(("cum_reward", "best"), [("sum", "ab"), ("mean", "ab"), ("max", "ab"), (min, "cd")])
def test_the_highest_cumulative_reward_is_that_of_a_whole_path_and_its_end(
    cum_reward: Any, best: str, drive: Drive
) -> None:
    """a and ab: 1 and 9; c and cd: 4 and 5, of which the sum, 9, is the lower one, but the lowest, 4, the higher."""
    children = {"": ["a", "c"], "a": ["b"], "c": ["d"]}
    worth = {"a": 1.0, "c": 4.0, "ab": 9.0, "cd": 5.0}
    search = MCTS(depth=3, iterations=12, fast=None, exploration=50, cum_reward=cum_reward)
    search, _ = drive(search, lambda p: children[p], lambda p: worth[p])
    assert visits(search).keys() == {"", "a", "c", "ab", "cd"}
    assert path(search, search.best) == best


# -- depth and ends ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rollout", ["none", "greedy"])
def test_a_depth_of_t_grows_t_minus_1_levels(rollout: Any, drive: Drive) -> None:
    search, _ = drive(MCTS(depth=4, iterations=30, rollout=rollout), lambda p: ["a", "b"], lambda p: 1.0)
    assert {node.depth for node in search.tree} == {0, 1, 2, 3}


def test_where_no_end_is_reached_the_best_state_is_kept_and_the_search_says_so(drive: Drive) -> None:
    """Visits: b, then bb, which has the higher Q."""
    search = MCTS(iterations=2, cum_reward="mean", exploration=0)
    search, _ = drive(search, lambda p: ["a", "b"], lambda p: p.count("b") * 1.0, Named())
    assert path(search, search.best) == "bb"
    assert search.stopped == "no terminal state was reached in 2 iterations"


def test_a_verified_answer_ends_the_search_at_once(drive: Drive) -> None:
    """x! is there from the start, and worth least."""
    table = lambda p: [] if p else ["y!", "x!"]  # noqa: E731
    worth = {"y!": 5.0, "x!": 1.0}.__getitem__
    search, asked = drive(MCTS(iterations=6), table, worth, Named())
    assert (path(search, search.best), visits(search)) == ("x!", {})
    assert asked[0] == "expand"
    assert search.stopped is None


# -- rollouts ---------------------------------------------------------------------------------------------------

DEEP = {"": ["a", "b"], "b": ["c", "d"], "bd": ["e", "f"]}
WORTH = {"a": 1.0, "b": 2.0, "bc": 0.0, "bd": 5.0, "bde": 1.0, "bdf": 3.0}


def test_a_greedy_rollout_goes_on_by_the_best_child_to_an_end(drive: Drive) -> None:
    heard: list[list[str]] = []
    hooks = {"on_simulate": lambda search, nodes: heard.append([path(search, node) for node in nodes])}
    search = MCTS(depth=4, iterations=1, rollout="greedy", cum_reward="sum")
    search, asked = drive(search, lambda p: DEEP[p], lambda p: WORTH[p], hooks=hooks)
    assert asked == ["expand", "evaluate a b", "expand b", "evaluate bc bd", "expand bd", "evaluate bde bdf"]
    assert heard == [["b", "bd", "bdf"]]
    assert visits(search) == {"": 1, "b": 1, "bd": 1, "bdf": 1}
    assert [search.tree[i].q for i in (0, 2)] == [2 + 5 + 3] * 2
    assert (path(search, search.best), search.stopped) == ("bdf", None)


def test_without_a_rollout_the_leafs_own_value_is_backed_up(drive: Drive) -> None:
    search, asked = drive(MCTS(depth=4, iterations=1), lambda p: DEEP[p], lambda p: WORTH[p])
    assert asked == ["expand", "evaluate a b"]
    assert [search.tree[i].q for i in (0, 1, 2)] == [2, None, 2]


def test_a_rollout_that_runs_into_a_dead_end_backs_up_what_it_met(drive: Drive) -> None:
    search = MCTS(depth=9, iterations=1, rollout="greedy", cum_reward="sum")
    search, _ = drive(search, lambda p: DEEP.get(p, []), lambda p: WORTH[p])
    assert search.tree.root.q == 10
    assert search.stopped == "no terminal state was reached in 1 iterations"


# -- leaves gathered together -----------------------------------------------------------------------------------


def test_leaves_of_one_batch_are_different_and_iterations_stay_the_same(drive: Drive) -> None:
    search = MCTS(thoughts=None, iterations=5, fast=None, leaves=2)
    search, asked = drive(search, lambda p: list("abcde"), lambda p: 1.0)
    assert asked == ["expand", "evaluate a b", "evaluate c d", "evaluate e"]  # the fifth alone: five are wanted
    assert visits(search) == {"": 5} | dict.fromkeys("abcde", 1)


def test_a_gathered_visit_counts_as_the_worst_so_far_until_its_reward_is_known(drive: Drive) -> None:
    """Alone, a is followed three times over; of three gathered, one each."""
    worth = {"a": 5.0, "b": 1.0, "c": 0.5}.__getitem__
    alone, _ = drive(MCTS(iterations=3, exploration=0.1), lambda p: list("abc"), worth)
    assert visits(alone) == {"": 3, "a": 3}
    together, _ = drive(MCTS(iterations=3, exploration=0.1, leaves=3), lambda p: list("abc"), worth)
    assert visits(together) == {"": 3, "a": 1, "b": 1, "c": 1}
    assert [node.q for node in together.tree][1:] == [5, 1, 0.5]  # no trace of the loss is left


@pytest.mark.parametrize("leaves", [1, 2, 3, 7, 50])
@pytest.mark.parametrize("rollout", ["none", "greedy"])
def test_however_many_are_gathered_all_iterations_are_made(leaves: int, rollout: Any, drive: Drive) -> None:
    mcts = MCTS(depth=4, iterations=20, leaves=leaves, rollout=rollout)
    search, _ = drive(mcts, lambda p: ["a", "b"], lambda p: len(p) + p.count("b") / 10)
    assert search.tree.root.visits == 20
    single, _ = drive(mcts, lambda p: ["a"], lambda p: 1.0)  # one leaf at a time is all there is
    assert single.tree.root.visits == 20


def test_more_leaves_make_fewer_and_larger_batches(drive: Drive) -> None:
    def steps(leaves: int) -> int:
        search = MCTS(thoughts=None, depth=3, iterations=32, leaves=leaves, exploration=3)
        return len(drive(search, lambda p: list("abcdefgh"), lambda p: 1.0)[1])

    assert steps(8) < steps(1) / 2


# -- fast rewards -----------------------------------------------------------------------------------------------


def test_a_cheaper_judge_stands_for_q_until_the_visit_and_the_evaluator_judges_then(drive: Drive) -> None:
    """By the cheap judge b comes first; visited, it is worth nothing, and a's guess is the better one."""
    cheap, true = {"a": 1.0, "b": 2.0}, {"a": 3.0, "b": 0.0}
    search = MCTS(iterations=2, fast=Value(), exploration=0)
    search, asked = drive(search, lambda p: ["a", "b"], lambda p, fast=False: (cheap if fast else true)[p])
    assert asked == ["expand", "fast a b", "evaluate b", "evaluate a"]
    assert [(node.fast, node.value, node.reward, node.q) for node in search.tree][1:] == [(1, 3, 3, 3), (2, 0, 0, 0)]


def test_without_a_fast_judge_only_visited_states_are_judged_in_the_order_of_growth(drive: Drive) -> None:
    _, asked = drive(MCTS(iterations=2, fast=None), lambda p: ["a", "b", "c"], lambda p: 1.0)
    assert asked == ["expand", "evaluate a", "evaluate b"]


class Asked(Letters):
    templates: ClassVar = {
        "thought": "grow",
        "value": "value {{ thought }}",
        "guess": "guess {{ thought }}",
        "answer": "answer {{ thoughts[-1].thought }}",
    }


def test_solve_asks_the_cheap_judge_for_new_children_and_the_evaluator_for_visits(scripted: Any) -> None:
    replies = {"grow": ["a", "b"], "guess a": "4", "guess b": "6", "value a": "7", "value b": "2"}
    decoder = scripted(replies)
    search = MCTS(thoughts=2, iterations=2, exploration=0, fast=Value(template="guess"))
    solution = solve(Asked, "q", decoder=decoder, search=search, evaluator=Value())
    assert decoder.asked == [["grow"], ["guess a", "guess b"], ["value b"], ["value a"], ["answer a"]]
    assert (solution.answer, solution.value) == ("answer a", 7)


def test_the_cheap_judge_may_be_named_as_the_evaluator_may(scripted: Any) -> None:
    decoder = scripted({"grow": ["a", "b"], "value a": "7", "value b": "2"})
    search = MCTS(thoughts=2, iterations=1, fast="value")
    solution = solve(Asked, "q", decoder=decoder, search=search, evaluator="value")
    assert solution.value == 7
