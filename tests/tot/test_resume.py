"""Resuming: a run that is killed after any step and resumed equals an uninterrupted run."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from copy import copy
from pathlib import Path
from typing import Any

import pytest

from tot import (
    BFS,
    DFS,
    MCTS,
    BestFirst,
    BestOfN,
    Budget,
    Checkpoint,
    Combine,
    Likelihood,
    Prior,
    Propose,
    Sample,
    SelfConsistency,
    Solution,
    Task,
    Value,
    Vote,
    solve,
)
from tot.decoders import TaskError

YES = Likelihood(labels={"1": 1.0, "2": 0.0})
RUNS: dict[str, dict[str, Any]] = {
    "bfs": {"search": BFS(thoughts=2, breadth=2, depth=3)},
    "bfs-all": {"search": BFS(thoughts=2, breadth=3, depth=3, select="all"), "reproducible": True},
    "bfs-vote": {"search": BFS(thoughts=2, breadth=2, depth=3, aggregate="vote"), "evaluator": Vote(samples=2)},
    "propose": {"search": BFS(thoughts=2, breadth=1, depth=3), "generator": Propose()},
    "dfs": {"search": DFS(thoughts=2, depth=3), "evaluator": Value()},
    "best-first": {"search": BestFirst(thoughts=2, depth=3, rank="value")},
    "mcts": {"search": MCTS(thoughts=2, depth=3, iterations=4)},
    "mcts-fast": {
        "search": MCTS(thoughts=2, depth=3, iterations=3, fast=YES, rollout="greedy"),
        "generator": Sample(samples=2),
        "evaluator": Combine(evaluators=(YES, Prior()), weights=(0.5, 0.5), rule="product"),
    },
    "self-consistency": {"search": SelfConsistency(samples=3)},
    "best-of-n": {"search": BestOfN(samples=3), "evaluator": "random"},
}


@pytest.fixture
def asking(letters: Any) -> type[Task]:
    """Letters with a template for every request that a search can make."""
    ballot = "{% for candidate in candidates %}{{ loop.index }}={{ candidate }};{% endfor %}"
    templates = {"vote": ballot, "chain": "chain {{ question }}", "propose": "list {{ thoughts | length }}"}
    return type("Asking", (letters,), {"templates": letters.templates | templates})


def run(task: Any, decoder: Any, trace: Checkpoint, **options: Any) -> Solution:
    try:
        return solve(task, "what?", **{"decoder": decoder, "max_tokens": 5, "seed": 3, "checkpoint": trace} | options)
    finally:
        trace.close()


@pytest.fixture
def killed(tmp_path: Path) -> Callable[[Path, int], Checkpoint]:
    """Cut a trace as a kill does, after `count` lines and half of the next: killed(whole, 3)."""

    def cut(whole: Path, count: int) -> Checkpoint:
        lines = whole.read_text().splitlines(keepends=True)
        half = lines[count][: len(lines[count]) // 2] if count < len(lines) else ""
        path = tmp_path / f"{count}.jsonl"
        path.write_text("".join(lines[:count]) + half)
        return Checkpoint.resume(path)

    return cut


def unweighed(node: dict[str, Any]) -> dict[str, Any]:
    """Return a node without token log-probabilities, whose last digits depend on the packing."""
    for part in (node.get("thought") or {}).get("drawn", {}).values():
        part.pop("logprobs")
    return node


def nodes(solution: Solution) -> list[dict[str, Any]]:
    """Return every field of every node except times; floating-point results are rounded."""
    fields = [unweighed(node.to_json()) for node in solution.tree]
    return [
        {
            name: pytest.approx(value, rel=1e-4) if isinstance(value, float) else value
            for name, value in node.items()
            if name != "seconds"
        }
        for node in fields
    ]


@pytest.mark.parametrize("name", RUNS)
def test_a_run_killed_after_any_step_ends_as_an_uninterrupted_run(
    asking: Any, tiny: Any, killed: Any, tmp_path: Path, name: str
) -> None:
    whole = tmp_path / "whole.jsonl"
    with tiny() as decoder:
        expected = run(asking, decoder, Checkpoint.create(whole), **RUNS[name])
    lines = whole.read_text().splitlines()
    assert len(lines) >= 3
    for count in range(1, len(lines)):
        with tiny() as decoder:
            resumed = run(asking, decoder, killed(whole, count), **RUNS[name])
        assert nodes(resumed) == nodes(expected), f"killed after line {count}"
        assert resumed.answer == expected.answer, f"killed after line {count}"
        assert resumed.tree.links() == expected.tree.links()
        assert resumed.usage.new_tokens == expected.usage.new_tokens, f"killed after line {count}"
        assert resumed.usage.prompt_tokens == expected.usage.prompt_tokens, f"killed after line {count}"
        assert resumed.calls == expected.calls, f"killed after line {count}"
        again = (tmp_path / f"{count}.jsonl").read_text().splitlines()
        assert [json.loads(line).get("step") for line in again] == [json.loads(line).get("step") for line in lines]


def test_a_run_ended_by_a_budget_resumes_with_a_larger_one(letters: Any, scripted: Any, tmp_path: Path) -> None:
    table = {"grow": ["a", "b"], "value a": "3", "value b": "7", "grow b": ["c", "d"], "value b/c": "2"}
    table |= {"value b/d": "9", "answer b/d": "the end"}
    options: dict[str, Any] = {"search": BFS(thoughts=2, breadth=1, depth=3), "evaluator": Value()}
    path = tmp_path / "run.jsonl"
    expected = solve(letters, "what?", decoder=scripted(table), **options)
    small = run(
        letters, scripted(table), Checkpoint.create(path), seed=0, max_tokens=None, budget=Budget(tokens=25), **options
    )
    assert small.stopped == "budget: tokens (30 of 25)"
    decoder = scripted(table)
    large = run(
        letters, decoder, Checkpoint.resume(path), seed=0, max_tokens=None, budget=Budget(tokens=100), **options
    )
    assert decoder.prompts == [["grow b"], ["value b/c", "value b/d"], ["answer b/d"]]
    assert (large.answer, large.stopped, large.calls) == ("the end", None, expected.calls)
    assert large.usage.new_tokens == expected.usage.new_tokens


def test_the_time_before_the_kill_counts(letters: Any, scripted: Any, killed: Any, tmp_path: Path) -> None:
    class Slow(scripted):  # type: ignore[misc]
        wait = 0.1

        def generate(self, requests: Any) -> Any:
            time.sleep(self.wait)
            return super().generate(requests)

    options: dict[str, Any] = {"search": BFS(thoughts=1, breadth=1, depth=3), "evaluator": Value()}
    whole = tmp_path / "whole.jsonl"
    run(letters, Slow({}), Checkpoint.create(whole), **options)
    Slow.wait = 0.0
    resumed = run(letters, Slow({}), killed(whole, 6), **options)
    assert resumed.usage.seconds >= 0.4  # four steps of the first run


@pytest.mark.parametrize("changed", ["weights", "chat template", "name"])
def test_another_model_is_refused(asking: Any, tiny: Any, killed: Any, tmp_path: Path, changed: str) -> None:
    whole, options = tmp_path / "whole.jsonl", {"search": BFS(thoughts=1, breadth=1, depth=3), "evaluator": Value()}
    with tiny() as decoder:
        run(asking, decoder, Checkpoint.create(whole), **options)
        run(asking, decoder, killed(whole, 4), **options)
    with tiny() as decoder:
        loaded = decoder.engine.loaded
        if changed == "weights":
            loaded.model.model.embed_tokens.weight.data[0, 0] += 1
        elif changed == "name":
            loaded.name = "folder/other.gguf"
        else:
            loaded.tokenizer = copy(loaded.tokenizer)
            loaded.tokenizer.chat_template += " "
        with pytest.raises(
            TaskError, match=r"holds another run: its models is {'generate': '\w+ [0-9a-f]{16}', .*not {"
        ):
            run(asking, decoder, killed(whole, 4), **options)


# -- the command line -------------------------------------------------------------------------------------------


def saved(path: Path) -> dict[str, Any]:
    """Return a saved run's tree without times; floating-point results are rounded."""
    tree: dict[str, Any] = json.loads(path.read_text())["tree"]
    for node in tree["nodes"]:
        unweighed(node).pop("seconds", None)
        node.update({k: pytest.approx(v, rel=1e-4) for k, v in node.items() if isinstance(v, float)})
    for call in (call for calls in tree["calls"].values() for call in calls if "choices" in call):
        call["choices"] = {choice: pytest.approx(logprob, rel=1e-4) for choice, logprob in call["choices"].items()}
    return tree


@pytest.mark.processes
@pytest.mark.real
def test_a_killed_solve_command_is_resumed(smollm2: str, python: Any, tmp_path: Path) -> None:
    question = "Tom has 3 apples and buys 4 more. How many apples does he have?\nA) 4\nB) 7"
    command = [
        "-m",
        "tot.cli.app",
        "solve",
        "multiple_choice",
        question,
        "--prompts",
        "papers",
        "--search",
        "bfs:thoughts=2,breadth=1,depth=3",
    ]
    command += ["--max-tokens", "8", "--model", smollm2, "--reproducible", "--out"]
    whole = python(*command, "whole.json")
    assert whole.wait(timeout=120) == 0
    first = python(*command, "run.json")
    trace = tmp_path / "run.jsonl"
    deadline = time.monotonic() + 120
    while not trace.exists() or trace.read_bytes().count(b"\n") < 4:
        assert first.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.005)
    first.kill()
    first.wait()
    assert not (tmp_path / "run.json").exists()
    second = python("-m", "tot.cli.app", "solve", "--resume", "run.jsonl")
    out, err = second.communicate(timeout=120)
    assert (second.returncode, err) == (0, "")
    assert "Answer: " in out
    assert saved(tmp_path / "run.json") == saved(tmp_path / "whole.json")
    runs = [json.loads((tmp_path / name).read_text()) for name in ("run.json", "whole.json")]
    assert runs[0]["answer"] == runs[1]["answer"]
    assert runs[0]["calls"] == runs[1]["calls"]
    assert runs[0]["usage"]["new_tokens"] == runs[1]["usage"]["new_tokens"]
    assert not trace.exists()  # the run has all of it
