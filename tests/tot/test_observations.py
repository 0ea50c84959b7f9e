"""Results of `act`: errors, missing and invalid results, long texts and lone surrogates."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import pytest

from tot import BFS, Checkpoint, Observation, State, Task, Thought, solve
from tot.decoders.errors import OptionError, TaskError
from tot.tree.tree import ThoughtTree


class Words(Task):
    """A thought is a word."""

    templates: ClassVar = {"word": "try {{ question }}"}
    thought = ("word",)

    def heuristic(self, state: State) -> float:
        return 0.0

    def answer_at(self, state: State) -> str | None:
        return state.thoughts[-1].text if state.thoughts else None


def texts(tree: ThoughtTree) -> list[tuple[str, str | None]]:
    thoughts = [node.thought for node in tree if node.thought is not None]
    return [(one.text, None if one.observation is None else one.observation.text) for one in thoughts]


@pytest.mark.parametrize("error", [ValueError("no such door"), TimeoutError(), OSError(5, "broken")])
def test_an_exception_of_an_act_is_the_observation(scripted: Any, error: Exception) -> None:
    class Broken(Words):
        async def act(self, state: State, thought: Thought) -> Observation:
            raise error

    decoder = scripted({"try q": ["a", "b"]})
    solution = solve(Broken, "q", decoder=decoder, search=BFS(thoughts=2, depth=2), evaluator="heuristic")
    assert texts(solution.tree) == [(letter, f"{type(error).__name__}: {error}".removesuffix(": ")) for letter in "ab"]


def test_a_result_that_is_not_an_observation_is_rejected(scripted: Any) -> None:
    class Wrong(Words):
        async def act(self, state: State, thought: Thought) -> Any:
            return "3 wrong"

    with pytest.raises(TaskError, match=r"Wrong\.act gave '3 wrong': return an Observation, or None"):
        solve(Wrong, "q", decoder=scripted({"try q": ["a", "b"]}), search=BFS(thoughts=2, depth=2))


def test_an_option_error_of_an_act_ends_the_run(scripted: Any) -> None:
    class Unconfined(Words):
        async def act(self, state: State, thought: Thought) -> Observation:
            raise OptionError("no sandbox here")

    with pytest.raises(OptionError, match="no sandbox here"):
        solve(Unconfined, "q", decoder=scripted({"try q": ["a", "b"]}), search=BFS(thoughts=2, depth=2))


def test_a_long_observation_is_truncated_and_marked(scripted: Any) -> None:
    class Long(Words):
        async def act(self, state: State, thought: Thought) -> Observation:
            return Observation(text="x" * 5_000_000)

    solution = solve(
        Long, "q", decoder=scripted({"try q": ["a", "b"]}), search=BFS(thoughts=2, depth=2), evaluator="random"
    )
    assert texts(solution.tree)[0][1] == "x" * 4000 + "\n… (cut: 5000000 characters)"


def test_lone_surrogates_in_an_observation_are_replaced(scripted: Any, tmp_path: Path) -> None:
    class Odd(Words):
        async def act(self, state: State, thought: Thought) -> Observation:
            raise ValueError("\ud800 wrong \x00")

    trace = Checkpoint.create(tmp_path / "trace.jsonl")
    options = {"search": BFS(thoughts=2, depth=2), "evaluator": "random", "checkpoint": trace}
    tree = solve(Odd, "q", decoder=scripted({"try q": ["a", "b"]}), **options).tree
    trace.close()
    tree.save(tmp_path / "run.json")
    assert texts(ThoughtTree.load(tmp_path / "run.json"))[0] == ("a", "ValueError: ? wrong \x00")
