"""The answer of a search: of the best state, by vote, or the likeliest choice; and searches without a model."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, ClassVar

import pytest

from tot import (
    BFS,
    Enumerate,
    Heuristic,
    Prior,
    Propose,
    Sample,
    Solution,
    State,
    Task,
    Thought,
    Value,
    solve,
)
from tot.decoders import RequestError

FOUR = {"grow": ["a", "b", "c", "d"], "value a": "9", "value b": "5", "value c": "6", "value d": "2"}


def grow(task: Any, decoder: Any, aggregate: Any = "vote", **options: Any) -> Solution:
    search = BFS(thoughts=4, breadth=4, depth=2, aggregate=aggregate)
    return solve(task, "q", **{"decoder": decoder, "search": search, "evaluator": Value()} | options)


def chosen(solution: Solution) -> str:
    """Return the chosen path."""
    return "/".join(node.thought.text for node in solution.tree if node.chosen and node.thought)


# -- votes ------------------------------------------------------------------------------------------------------


def test_complete_states_vote_with_their_values_and_may_outvote_the_best(letters: Any, scripted: Any) -> None:
    replies = {"answer a": "1", "answer b": "2", "answer c": "2", "answer d": "1"}  # 9 + 2 for 1, 5 + 6 for 2
    tied = grow(letters, scripted(FOUR | replies))
    assert (tied.answer, chosen(tied)) == ("1", "a")
    lost = grow(letters, scripted(FOUR | replies | {"answer d": "3"}))  # 9 for 1, 11 for 2, 2 for 3
    assert (lost.answer, lost.value, chosen(lost)) == ("2", 6, "c")  # the best state that voted for it
    best = grow(letters, scripted(FOUR | replies), aggregate="best")
    assert (best.answer, best.value, chosen(best)) == ("1", 9, "a")


def test_a_verified_answer_needs_no_votes(letters: Any, scripted: Any) -> None:
    def answer_at(self: Task, state: State) -> str | None:
        return "right" if state.text == "d" else None

    fields = {"answer_at": answer_at, "verify": lambda self, question, answer: answer == "right"}
    decoder = scripted(FOUR)
    solution = grow(type("Sure", (letters,), fields), decoder)
    assert (solution.answer, solution.solved, chosen(solution)) == ("right", True, "d")
    assert decoder.prompts == [["grow"]]


# -- no model ---------------------------------------------------------------------------------------------------


class Countdown(Task):
    """Take 1 or 2 from a number until nothing is left."""

    templates: ClassVar = {"answer": "answer"}
    depth = 6

    def start(self, question: str) -> State:
        return State(question=question, world=int(question))

    def actions(self, state: State) -> Sequence[str]:
        return [str(take) for take in (1, 2) if isinstance(state.world, int) and take <= state.world]

    def step(self, state: State, thought: Thought) -> State:
        assert isinstance(state.world, int)
        return state.then(thought, state.world - int(thought.text))

    def is_terminal(self, state: State) -> bool:
        return state.world == 0

    def heuristic(self, state: State) -> float:
        assert isinstance(state.world, int)
        return state.world / 2

    def answer_at(self, state: State) -> list[str] | None:
        return [thought.text for thought in state.thoughts] if state.world == 0 else None

    def verify(self, question: str, answer: Any) -> bool:
        return sum(map(int, answer)) == int(question)


@pytest.mark.parametrize("search", ["best-first", "bfs:thoughts=none", "dfs:thoughts=none", "mcts:thoughts=none"])
def test_a_task_with_a_world_is_solved_without_a_model(search: str) -> None:
    options = {"generator": Enumerate(prior="uniform"), "evaluator": Heuristic()}
    solution = solve(Countdown, "5", model=None, search=search, **options)  # type: ignore[arg-type]
    assert solution.solved
    assert sum(map(int, solution.answer or ())) == 5
    assert (solution.calls, solution.usage.new_tokens, solution.stopped) == (0, 0, None)
    assert {node.decoder for node in solution.tree} == {None}


@pytest.mark.parametrize(
    "options",
    [
        {"generator": Sample()},
        {"generator": Propose()},
        {"generator": Enumerate()},
        {"generator": Enumerate(prior="uniform"), "evaluator": Value()},
    ],
)
def test_an_option_that_needs_a_model_is_rejected_without_one(options: Any) -> None:
    every = dict.fromkeys(("thought", "value", "propose", "answer"), "text")
    task = type("Templated", (Countdown,), {"templates": every})
    with pytest.raises(RequestError, match=r"the search needs a model, but none was given: give model="):
        solve(task, "5", **{"model": None, "search": BFS(thoughts=2), "evaluator": Prior()} | options)


def test_negative_values_vote_by_their_exponentials(letters: Any, scripted: Any) -> None:
    class Logs(Value):
        def read(self, task: Task, text: str) -> float:
            return math.log(float(text))

    replies = {"answer a": "1", "answer b": "2", "answer c": "2", "answer d": "1"}
    values = {"value a": "0.5", "value b": "0.3", "value c": "0.3", "value d": "0.05"}  # 0.55 for 1, 0.6 for 2
    solution = grow(letters, scripted(FOUR | values | replies), evaluator=Logs())
    assert (solution.answer, chosen(solution)) == ("2", "b")
