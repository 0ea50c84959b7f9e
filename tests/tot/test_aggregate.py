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
    SelfConsistency,
    Solution,
    State,
    Task,
    Thought,
    Value,
    solve,
)
from tot.decoders import RequestError
from tot.decoders.request import ChoiceLogprob

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


def test_an_answer_cut_off_by_a_budget_has_no_vote(letters: Any, scripted: Any) -> None:
    replies = {"answer a": scripted.completion("1", "budget"), "answer b": "2", "answer c": "3", "answer d": "2"}
    assert grow(letters, scripted(FOUR | replies)).answer == "2"  # 5 + 2 against 6


def test_a_verified_answer_needs_no_votes(letters: Any, scripted: Any) -> None:
    def answer_at(self: Task, state: State) -> str | None:
        return "right" if state.text == "d" else None

    fields = {"answer_at": answer_at, "verify": lambda self, question, answer: answer == "right"}
    decoder = scripted(FOUR)
    solution = grow(type("Sure", (letters,), fields), decoder)
    assert (solution.answer, solution.solved, chosen(solution)) == ("right", True, "d")
    assert decoder.prompts == [["grow"]]


def test_self_consistency_takes_the_most_frequent_answer(letters: Any, scripted: Any) -> None:
    templates = letters.templates | {"chain": "chain"}
    fields = {"templates": templates, "parse_answer": lambda self, text: text[-1] if text[-1].isdigit() else None}
    decoder = scripted({"chain": ["so 1", "so 2", "no idea", "thus 2", "so 3"]})
    solution = solve(type("Chained", (letters,), fields), "q", decoder=decoder, search=SelfConsistency(samples=5))
    assert decoder.prompts == [["chain"]]
    assert (solution.answer, chosen(solution)) == ("2", "so 2")


# -- choices ----------------------------------------------------------------------------------------------------


@pytest.fixture
def choosing(letters: Any) -> type[Task]:
    """Letters with the choices yes, no and maybe."""
    return type("Choosing", (letters,), {"choices": lambda self, state: ["yes", "no", "maybe not"]})


def likelihoods(scripted: Any, *probabilities: float) -> Any:
    scores = tuple(ChoiceLogprob(math.log(p), tokens) for p, tokens in zip(probabilities, (1, 1, 4), strict=True))
    return scripted.completion("", "stop", 0, choice_logprobs=scores)


def test_the_likeliest_choice_is_the_answer(choosing: Any, scripted: Any) -> None:
    decoder = scripted(FOUR | {"answer a": likelihoods(scripted, 0.2, 0.3, 0.1)})
    solution = grow(choosing, decoder, aggregate="best")
    assert solution.answer == "no"
    assert decoder.requests[-1].choices == ("yes", "no", "maybe not")
    assert decoder.requests[-1].purpose == "answer"


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
