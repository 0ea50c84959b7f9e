"""Searches that prune nothing: each branch continues when its own thought ends."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from tot import BFS, Budget, Checkpoint, Solution, Thought, Value, solve
from tot.decoders import Completion, Request, RequestError

ALL = BFS(thoughts=2, breadth=2, depth=3, select="all")
REPLIES: dict[str, Any] = {"grow": ["a", "b"], "grow a": "c", "grow b": "d", "value a": "3", "value b": "7"}
REPLIES |= {"value a/c": "9", "value b/d": "5", "answer a/c": "the end"}


@pytest.fixture
def slow(scripted: Any) -> type:
    """A decoder whose reply to a prompt ends only once another prompt was requested: Slow(replies, {"b": "a"})."""

    class Slow(scripted):  # type: ignore[misc]
        def __init__(self, replies: dict[str, Any], after: dict[str, str]) -> None:
            super().__init__(replies)
            self.after = after
            self.requested: dict[str, asyncio.Event] = {}
            self.cancelled: list[str] = []

        def start(self, requests: Sequence[Request], meter: Any = None) -> list[asyncio.Task[list[Completion]]]:
            self.batches.append(list(requests))
            return [asyncio.ensure_future(self.one(request)) for request in requests]

        async def one(self, request: Request) -> list[Completion]:
            prompt = request.prompt[-1].content
            self.requested.setdefault(prompt, asyncio.Event()).set()
            if prompt in self.after:
                event = self.requested.setdefault(self.after[prompt], asyncio.Event())
                try:
                    await asyncio.wait_for(event.wait(), 20)
                except asyncio.CancelledError:
                    self.cancelled.append(prompt)
                    raise
            return [self._reply(request, sample) for sample in range(request.sampling.n)]

    return Slow


def grow(task: Any, decoder: Any, **options: Any) -> Solution:
    return solve(task, "q", decoder=decoder, **{"search": ALL, "evaluator": Value(), **options})


def test_a_short_branch_is_evaluated_and_expanded_before_the_longest_sibling_ends(
    letters: Any, slow: Any, paths: Callable[..., list[str]]
) -> None:
    decoder = slow(REPLIES, {"grow a": "value b/d"})
    solution = grow(letters, decoder)
    assert paths(solution.tree) == ["", "a", "b", "b/d", "a/c"]
    assert [solution.tree.place(node) for node in solution.tree] == ["0", "0.0", "0.1", "0.1.0", "0.0.0"]
    assert (solution.answer, solution.value) == ("the end", 9)


def test_reproducible_runs_are_level_by_level(letters: Any, scripted: Any, paths: Callable[..., list[str]]) -> None:
    decoder = scripted(REPLIES)
    solution = grow(letters, decoder, reproducible=True)
    assert paths(solution.tree) == ["", "a", "b", "b/d", "a/c"]
    assert [sorted(batch) for batch in decoder.prompts] == [
        ["grow"],
        ["value a", "value b"],
        ["grow a", "grow b"],
        ["value a/c", "value b/d"],
        ["answer a/c"],
    ]


def test_a_verified_answer_cancels_the_other_branches(letters: Any, slow: Any) -> None:
    class Verified(letters):  # type: ignore[misc]
        def answer_at(self, state: Any) -> str | None:
            return "d" if state.text.endswith("d") else None

        def verify(self, question: str, answer: str) -> bool:
            return answer == "d"

    decoder = slow(REPLIES, {"grow a": "never"})
    solution = grow(Verified(), decoder)
    assert (solution.answer, solution.solved, solution.stopped) == ("d", True, None)
    assert decoder.cancelled == ["grow a"]


def test_an_error_in_one_branch_cancels_the_others(letters: Any, slow: Any) -> None:
    class Failing(slow):  # type: ignore[misc]
        async def one(self, request: Request) -> list[Completion]:
            if request.prompt[-1].content == "grow b":
                raise RequestError("too long")
            return await super().one(request)  # type: ignore[no-any-return]

    decoder = Failing(REPLIES, {"grow a": "never"})
    with pytest.raises(RequestError, match="too long"):
        grow(letters, decoder)
    assert decoder.cancelled == ["grow a"]


def test_branches_that_run_when_the_budget_ends_are_finished(
    letters: Any, slow: Any, paths: Callable[..., list[str]]
) -> None:
    decoder = slow(REPLIES, {"grow a": "value b/d"})
    search = ALL.model_copy(update={"depth": 4})
    solution = grow(letters, decoder, search=search, budget=Budget(nodes=3))
    assert paths(solution.tree) == ["", "a", "b", "b/d", "a/c"]
    assert solution.stopped == "budget: nodes (4 of 3)"


def test_branches_share_the_evaluation_of_equal_states(letters: Any, slow: Any) -> None:
    """`value d` of one branch is still running when the other branch reaches an equal state."""
    task = type("LastOnly", (letters,), {"templates": letters.templates | {"value": "value {{ thought }}"}})
    table = {"grow": ["a", "b"], "grow a": "d", "grow b": "d", "value a": "3", "value b": "7", "value d": "5"}
    decoder = slow(table, {"value d": "grow a", "grow a": "value d"})
    solution = grow(task, decoder)
    assert [request.prompt[-1].content for request in decoder.requests].count("value d") == 1
    assert [node.value for node in solution.tree if node.depth == 2] == [5, 5]


def test_a_run_in_order_of_arrival_resumes_in_that_order(
    letters: Any, slow: Any, scripted: Any, tmp_path: Path, paths: Callable[..., list[str]]
) -> None:
    whole = tmp_path / "whole.jsonl"
    trace = Checkpoint.create(whole)
    expected = grow(letters, slow(REPLIES, {"grow a": "value b/d"}), checkpoint=trace)
    trace.close()
    lines = whole.read_text().splitlines(keepends=True)
    for count in range(6, len(lines)):  # from here on, the results of branch b are recorded
        killed = tmp_path / f"{count}.jsonl"
        killed.write_text("".join(lines[:count]))
        trace = Checkpoint.resume(killed)
        decoder = slow(REPLIES, {})
        resumed = grow(letters, decoder, checkpoint=trace)
        trace.close()
        assert paths(resumed.tree) == paths(expected.tree)
        assert resumed.answer == expected.answer
        recorded = {"grow", "value a", "value b", "grow b"}
        assert not recorded & {request.prompt[-1].content for request in decoder.requests}


def test_states_are_merged_level_by_level(letters: Any, slow: Any, scripted: Any) -> None:
    class Places(letters):  # type: ignore[misc]
        def step(self, state: Any, thought: Thought) -> Any:
            return state.then(thought, thought.text)

    decoder = scripted(REPLIES)
    grow(Places(), decoder, search=ALL.model_copy(update={"merge": True}))
    assert [sorted(batch) for batch in decoder.prompts][2:4] == [["grow a", "grow b"], ["value a/c", "value b/d"]]
