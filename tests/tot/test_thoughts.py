"""Thought generators: sampling with votes, lists in one reply, and legal actions ranked by likelihood."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, ClassVar

import pytest

from tot import BFS, Enumerate, Propose, Random, Sample, Solution, State, Task, Thought, solve
from tot.decoders import TaskError
from tot.decoders.request import ChoiceLogprob

ONE_LEVEL = BFS(thoughts=None, breadth=9, depth=2)
PATH = "{{ thoughts | map(attribute='thought') | join('/') }}"


def grow(task: Any, decoder: Any, generator: Any, search: Any = ONE_LEVEL, **options: Any) -> Solution:
    return solve(task, "q", decoder=decoder, search=search, generator=generator, evaluator=Random(), **options)


def thoughts(solution: Solution) -> list[str]:
    """Return the texts after the root, in order of arrival."""
    return [node.thought.text for node in solution.tree if node.thought]


# -- Sample -----------------------------------------------------------------------------------------------------


@pytest.fixture
def numeric(letters: Any) -> type[Task]:
    """Letters with answers: the digits of a text."""

    class Numeric(letters):  # type: ignore[misc]
        def parse_answer(self, text: str) -> str | None:
            return "".join(filter(str.isdigit, text)) or None

    return Numeric


@pytest.mark.parametrize(
    ("samples", "thought", "confidence"),
    [
        (["5", "it is 7", "so 7"], "it is 7", 2 / 3),
        (["5", "7", "9"], "5", 1 / 3),
        (["who knows", "no idea", "it is 7"], "it is 7", 1 / 3),  # a text without an answer has no vote
        (["", "7", "7"], "7", 2 / 3),
    ],
)
def test_votes_are_for_answers_and_the_first_text_of_the_winner_is_the_thought(
    numeric: Any, scripted: Any, samples: list[str], thought: str, confidence: float
) -> None:
    solution = grow(numeric, scripted({"grow": samples}), Sample(thoughts=1, samples=3))
    assert thoughts(solution) == [thought]
    assert solution.tree[1].confidence == pytest.approx(confidence)
    assert solution.parse_failures == samples.count("")


class Steps(Task):
    """A thought is a sub-question and its sub-answer."""

    templates: ClassVar = {"ask": "ask", "tell": "tell {{ ask }}", "propose": "list {{ count }}", "answer": "answer"}
    thought = ("ask", "tell")
    depth = 2


# -- Propose ----------------------------------------------------------------------------------------------------


@pytest.fixture
def listing(letters: Any) -> type[Task]:
    """Letters with a template that asks for several thoughts."""
    templates = {**letters.templates, "propose": f"list {{{{ count }}}} {PATH}"}
    return type("Listing", (letters,), {"templates": templates})


@pytest.mark.parametrize(
    ("reason", "reply", "listed"),
    [
        ("length", "1. a\n2. b\n3. c and th", ["a", "b"]),
        ("length", "1. a and th", ["a and th"]),  # better than nothing
        ("length", "a\nb\nc\nd\ne and th", ["a", "b", "c"]),
        ("stop", "1. a\n2. b\n3. c", ["a", "b", "c"]),
        ("budget", "1. a\n2. b\n3. c", []),
        ("cancelled", "1. a\n2. b", []),
    ],
)
def test_a_truncated_line_is_dropped(listing: Any, scripted: Any, reason: str, reply: str, listed: list[str]) -> None:
    solution = grow(listing, scripted({"list 3": scripted.completion(reply, reason)}), Propose(thoughts=3))
    assert thoughts(solution) == listed
    assert solution.parse_failures == 0


# -- Enumerate --------------------------------------------------------------------------------------------------


class Walk(Task):
    """Steps on the number line: the world is the current position."""

    templates: ClassVar = {"thought": f"at {PATH}", "answer": f"answer {PATH}"}
    depth = 2
    moves: ClassVar[tuple[str, ...]] = ("left", "right", "stay")

    def start(self, question: str) -> State:
        return State(question=question, world=0)

    def actions(self, state: State) -> tuple[str, ...]:
        return self.moves

    def step(self, state: State, thought: Thought) -> State:
        assert isinstance(state.world, int)
        return state.then(thought, state.world + {"left": -1, "right": 1}.get(thought.text, len(thought.text) + 1))


@pytest.fixture
def walk() -> Callable[..., type[Task]]:
    """Walk with these moves: walk("left", "right")."""
    return lambda *moves, **fields: type("Walk", (Walk,), {"moves": moves or Walk.moves, **fields})


@pytest.fixture
def weighed(scripted: Any) -> Callable[..., Any]:
    """A decoder with these likelihoods of the actions at the root: weighed(0.1, 0.3)."""

    def make(*likelihoods: float) -> Any:
        scores = tuple(ChoiceLogprob(math.log(p) if p else -math.inf, 2) for p in likelihoods)
        return scripted({"at": scripted.completion("", "stop", 3, choice_logprobs=scores)})

    return make


def priors(solution: Solution) -> dict[str, float | None]:
    return {node.thought.text: node.prior for node in solution.tree if node.thought}


def test_priors_are_normalized_likelihoods_of_the_actions_in_descending_order(walk: Any, weighed: Any) -> None:
    decoder = weighed(0.02, 0.05, 0.03)
    solution = grow(walk(), decoder, Enumerate())
    assert thoughts(solution) == ["right", "stay", "left"]
    assert priors(solution) == pytest.approx({"right": 0.5, "stay": 0.3, "left": 0.2})
    assert [node.world for node in solution.tree] == [0, 1, 5, -1]
    assert [len(request.choices) for request in decoder.requests if request.choices] == [3]
    assert solution.tree.root.usage.new_tokens == 3  # the tokens count at the state
    assert {node.decoder for node in solution.tree if node.thought} == {type(decoder).__name__}


def test_a_task_without_actions_is_rejected_with_a_remedy(letters: Any, scripted: Any) -> None:
    with pytest.raises(TaskError, match=r"task Letters has no `actions`: define it, or sample thoughts"):
        grow(letters, scripted({}), Enumerate())
