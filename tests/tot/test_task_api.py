"""User-defined tasks: the smallest one, errors of faulty ones, zero budgets, and the cost of prompts."""

from __future__ import annotations

from typing import Any

import pytest

from tot import (
    BFS,
    Budget,
    Combine,
    Enumerate,
    Likelihood,
    Prior,
    Random,
    SearchState,
    State,
    Task,
    Thought,
    Value,
    load_task,
    solve,
)
from tot.decoders import Request, TaskError
from tot.task.world import HasAct, HasActions, HasAnswer, HasElection, HasHeuristic, HasTerminal


def drive(search: SearchState, table: dict[str, list[str]]) -> None:
    """Tell a search the thoughts after each path, and a value of 1 for each."""
    while (step := search.ask()) is not None:
        if hasattr(step, "count"):
            search.tell([table.get("/".join(t.text for t in state.thoughts), []) for state in step.states])
        else:
            search.tell([1.0] * len(step.nodes))


# -- errors of faulty tasks -------------------------------------------------------------------------------------


def test_a_missing_template_is_an_error_only_if_it_is_used(scripted: Any) -> None:
    half = type("Half", (Task,), {"templates": {"thought": "grow"}})
    decoder = scripted({"grow": ["a", "b"]})
    with pytest.raises(TaskError, match="task Half has no template 'value'"):
        solve(half, "q", decoder=decoder, search=BFS(thoughts=2, depth=2), evaluator=Value())
    with pytest.raises(TaskError, match="task Half has no template 'answer'"):
        solve(half, "q", decoder=decoder, search=BFS(thoughts=2, depth=2), evaluator=Random())


@pytest.mark.parametrize(
    ("methods", "message"),
    [
        (
            {"step": lambda self, state, thought: "a"},
            r"Odd\.step gave 'a': return state\.then\(thought, world\), or None",
        ),
        ({"step": lambda self, state, thought: state}, r"Odd\.step gave State\(.*: return state\.then"),
        (
            {"step": lambda self, state, thought: state.then(thought, {1, 2})},
            r"a world that is not JSON data, \{1, 2\}:",
        ),
        ({"cost": lambda self, state, thought: -1}, r"Odd\.cost gave -1: return a finite number, 0 or more"),
        ({"cost": lambda self, state, thought: float("nan")}, r"Odd\.cost gave nan: return a finite number"),
    ],
)
def test_an_invalid_result_of_a_method_is_rejected_with_the_valid_ones(
    letters: Any, methods: dict[str, Any], message: str
) -> None:
    with pytest.raises(TaskError, match=message):
        drive(BFS(thoughts=1).start(type("Odd", (letters,), methods)(), "q"), {"": ["a"]})


def test_an_illegal_thought_is_rejected_and_counted(letters: Any) -> None:
    def step(self: Task, state: State, thought: Thought) -> State | None:
        return None if thought.text == "no" else state.then(Thought(parts={"thought": thought.text.upper()}))

    search = BFS(thoughts=3).start(type("Legal", (letters,), {"step": step, "depth": 2})(), "q")
    drive(search, {"": ["a", "no", "b", "no"]})
    assert [node.thought.text for node in search.tree if node.thought] == ["A", "B"]  # as the task wrote them
    assert [node.rejected for node in search.tree] == [2, 0, 0]


# -- zero budgets -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("limit", ["tokens", "forwards", "seconds", "nodes"])
@pytest.mark.parametrize("search", ["bfs", "dfs", "best-first", "mcts", "cot", "self-consistency", "best-of-n"])
def test_a_zero_budget_sends_no_request_with_any_search(letters: Any, scripted: Any, search: str, limit: str) -> None:
    decoder = scripted({})
    solution = solve(letters, "q", decoder=decoder, search=search, budget=Budget(**{limit: 0}))
    assert decoder.batches == []
    assert (solution.answer, solution.calls, len(solution.tree)) == (None, 0, 1)
    assert solution.stopped is not None
    assert solution.stopped.startswith(f"budget: {limit} (")


# -- the cost of prompts ----------------------------------------------------------------------------------------


def computed(prompts: list[list[int]]) -> int:
    """Return the number of tokens that must be computed for a sequence of prompts.

    Every position in the trie of all prompts is computed once; a repeated prompt needs its last token again.
    """
    trie: set[tuple[int, ...]] = set()
    again = 0
    for prompt in prompts:
        again += tuple(prompt) in trie
        trie |= {tuple(prompt[:length]) for length in range(1, len(prompt) + 1)}
    return len(trie) + again


@pytest.mark.parametrize(
    ("evaluator", "generator"),
    [
        (Value(), None),
        (Likelihood(), None),
        (Combine(evaluators=(Likelihood(), Prior()), weights=(1, 1)), Enumerate()),
    ],
)
def test_every_shared_prefix_of_the_prompts_is_computed_once(
    letters: Any, tiny: Any, monkeypatch: pytest.MonkeyPatch, evaluator: Any, generator: Any
) -> None:
    """Generated tokens are in none of the prompts."""
    head = "Think step by step about the letters of the alphabet, and be brief. " * 2
    templates = {name: head + text for name, text in letters.templates.items()}
    task = type("Long", (letters,), {"templates": templates, "actions": lambda self, state: ["xy", "z"]})
    with tiny() as decoder:
        submitted: list[Request] = []
        submit = decoder.submit
        monkeypatch.setattr(
            decoder, "submit", lambda requests, *rest: submitted.extend(requests) or submit(requests, *rest)
        )
        search = BFS(thoughts=2, breadth=2, depth=3)
        solution = solve(
            task, "q", decoder=decoder, search=search, evaluator=evaluator, generator=generator, max_tokens=4
        )
        prompts = [decoder.engine.codec.encode_prompt(request.prompt) for request in submitted]
    usage = solution.usage
    assert len(prompts) >= 8
    assert usage.prompt_tokens == sum(map(len, prompts))
    assert usage.prompt_tokens - usage.reused_prompt_tokens == computed(prompts)
    assert computed(prompts) < usage.prompt_tokens / 3


@pytest.mark.parametrize(
    ("task", "capabilities"),
    [
        ("blocksworld", {HasActions, HasAnswer, HasHeuristic, HasTerminal}),
        ("creative_writing", {HasAnswer, HasHeuristic}),
        ("gsm8k", {HasAct, HasAnswer}),
        ("multiple_choice", set()),
        ("ask", {HasElection}),
    ],
)
def test_isinstance_reports_the_capabilities_of_a_task(task: str, capabilities: set[Any]) -> None:
    every = (HasAct, HasActions, HasAnswer, HasElection, HasHeuristic, HasTerminal)
    assert {one for one in every if isinstance(load_task(task), one)} == capabilities
