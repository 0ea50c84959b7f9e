"""Every installed task can be imported and runs with each search, generator and evaluator that it has templates for."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

import tot.tasks
from tot import Solution, load_decoder, load_task, solve
from tot.decoders import LocalDecoder
from tot.decoders.registry import declared

TASKS = ("ask", "blocksworld", "creative_writing", "game24", "gsm8k", "math", "multiple_choice")


@pytest.fixture(scope="module")
def decoder(smollm2: str) -> Iterator[LocalDecoder]:
    with load_decoder("ar", smollm2) as decoder:
        yield decoder


def run(name: str, decoder: Any, **options: Any) -> Solution:
    task = load_task(name)
    solution = solve(task, task.example(), decoder=decoder, max_tokens=10, **options)
    assert json.loads(json.dumps(solution.to_json()))["tree"]["nodes"][0]["id"] == 0
    assert solution.solved == (solution.answer is not None and task.verify(task.example(), solution.answer))
    return solution


def test_every_installed_task_can_be_imported_from_the_package() -> None:
    installed = {entry.value.rpartition(":")[2]: entry.load() for entry in declared("tot.tasks").values()}
    assert sorted(tot.tasks.__all__) == sorted(dir(tot.tasks)) == sorted(installed)
    assert all(getattr(tot.tasks, name) is cls for name, cls in installed.items())
    with pytest.raises(ImportError, match="cannot import name 'GSM9K'"):
        exec("from tot.tasks import GSM9K")


def test_importing_the_tasks_imports_no_torch() -> None:
    program = "import sys; from tot.tasks import *; print(GSM8K.__name__, 'torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "GSM8K False\n"


@pytest.mark.real
@pytest.mark.parametrize("name", TASKS)
def test_the_default_search_of_a_task_grows_a_tree(name: str, decoder: LocalDecoder) -> None:
    solution = run(name, decoder)
    assert len(solution.tree) > 1 or solution.parse_failures + solution.rejected > 0
    assert solution.calls > 0 or solution.solved  # A* needs no model


@pytest.mark.real
@pytest.mark.parametrize(
    ("search", "name"),
    [
        pytest.param(search, name, marks=pytest.mark.slow if search != "cot" and name != "gsm8k" else ())
        for search in ("cot", "self-consistency:samples=3", "best-of-n:samples=2")
        for name in TASKS
    ],
)
def test_the_baselines_write_whole_solutions(name: str, search: str, decoder: LocalDecoder) -> None:
    solution = run(name, decoder, search=search)
    chains = [node for node in solution.tree if node.parent is not None]
    assert chains
    assert all(node.thought is not None and list(node.thought.parts) == ["chain"] for node in chains)
    if search.startswith("best"):
        assert all(node.value is not None for node in chains)


@pytest.mark.real
@pytest.mark.parametrize("name", TASKS)
def test_every_task_supports_propose_and_vote(name: str, decoder: LocalDecoder) -> None:
    solution = run(name, decoder, search="bfs:thoughts=2,breadth=1,depth=2", generator="propose", evaluator="vote")
    values = [node.value for node in solution.tree if node.parent is not None]
    assert sum(value or 0 for value in values) <= 1 + 1e-9
    assert None not in values


@pytest.mark.real
@pytest.mark.parametrize("name", ["gsm8k", "blocksworld"])
def test_rap_is_an_mcts_configuration(name: str, decoder: LocalDecoder) -> None:
    solution = run(name, decoder, search="rap:iterations=2,depth=3")
    visited: Sequence[Any] = [node for node in solution.tree if node.visits and node.parent is not None]
    assert visited
    assert all(node.reward is not None and node.q is not None for node in visited)


def test_enumerable_tasks_are_solved_without_a_model() -> None:
    for name, search in (("blocksworld", "best-first"), ("game24", "dfs:thoughts=none")):
        task = load_task(name)
        solution = solve(
            task, task.example(), model=None, search=search, generator="enumerate:prior=uniform", evaluator="heuristic"
        )
        assert (solution.solved, solution.calls) == (True, 0)
        assert task.verify(task.example(), solution.answer)
