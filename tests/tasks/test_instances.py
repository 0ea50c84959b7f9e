"""Generated questions: solvable, distinct, reproducible, and disjoint from the excluded ones."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tot.cli.app import main
from tot.decoders.errors import TaskError
from tot.registry import load_task
from tot.tasks.blocks_planner import plain_plan, shortest_plan
from tot.tasks.blocksworld import Blocksworld, DirectBlocksworld, read_text


@pytest.mark.parametrize("seed", range(40))
def test_a_generated_problem_has_a_shortest_plan(seed: int) -> None:
    task = Blocksworld()
    row = task.instance(seed)
    question = task.question_of(row)
    assert row == task.instance(seed)
    assert task.score(row["plan"], question) == 1.0
    assert len(row["plan"]) == row["steps"] == len(shortest_plan(read_text(question)) or [])


@pytest.mark.parametrize("task", [Blocksworld(), DirectBlocksworld()], ids=["chain", "direct"])
def test_a_solution_continues_the_prompt(task: Blocksworld) -> None:
    row = task.instance(3)
    prompt = task.prompt(task.chain, task.start(row["question"]))
    whole = prompt[-1].content + task.solution_of(row)
    assert task.score(task.parse_answer(whole), row["question"]) == 1.0
    assert "Action 1: " in whole.splitlines()[-1 - len(task.parse_answer(whole) or [])]
    assert whole.endswith("\nThe goal is reached.")
    assert task.parse_answer(whole) == plain_plan(read_text(row["question"]))


def test_the_direct_prompt_is_the_problem_alone() -> None:
    task = DirectBlocksworld()
    question = task.instance(3)["question"]
    prompt = task.prompt(task.chain, task.start(question))
    assert [message.role for message in prompt] == ["user", "assistant"]
    assert prompt[0].content == question


@pytest.mark.parametrize("name", ["gsm8k", "creative_writing"])
def test_tasks_without_generated_instances_raise(name: str) -> None:
    task = load_task(name)
    with pytest.raises(TaskError, match="can't generate questions"):
        task.instance(0)
    with pytest.raises(TaskError, match="has no solutions"):
        task.solution_of({})


def test_instances_are_distinct_and_exclude_those_of_another_file(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    first, second = tmp_path / "first.jsonl", tmp_path / "second.jsonl"
    assert main(["instances", "blocksworld", "--count", "60", "--out", str(first)]) == 0
    assert main(["instances", "blocksworld", "--count", "30", "--out", str(second), "--without", str(first)]) == 0
    questions = [[json.loads(line)["question"] for line in path.read_text().splitlines()] for path in (first, second)]
    assert [len(set(some)) for some in questions] == [60, 30]
    assert not set(questions[0]) & set(questions[1])
    assert main(["instances", "gsm8k", "--out", str(first)]) == 2
    assert "can't generate questions" in capfd.readouterr().err


def test_too_few_distinct_questions_are_an_error(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "few.py").write_text(
        "from tot import Task\n\n\nclass Few(Task):\n    templates = {'chain': '{{ question }}'}\n\n"
        "    def instance(self, seed):\n        return {'question': str(seed % 5)}\n"
    )
    out = tmp_path / "out.jsonl"
    assert main(["instances", f"{tmp_path / 'few.py'}:Few", "--count", "6", "--out", str(out)]) == 2
    assert "hardly more than the 5 questions" in capfd.readouterr().err
    assert len(out.read_text().splitlines()) == 5
