"""Generated questions: solvable, distinct, reproducible, and disjoint from the excluded ones."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from benchmarks.list_functions import ListFunctions
from benchmarks.word_problems import WordProblems
from tot.cli.app import main
from tot.cli.instances import distinct_rows
from tot.tasks.blocks_planner import plain_plan, shortest_plan
from tot.tasks.blocksworld import Blocksworld, DirectBlocksworld, read_text
from tot.tasks.code import Code, examples


@pytest.mark.parametrize("seed", range(10))
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
    prompt = task.prompt("chain", task.start(row["question"]))
    whole = prompt[-1].content + row["solution"]
    assert task.score(task.parse_answer(whole), row["question"]) == 1.0
    assert "Action 1: " in whole.splitlines()[-1 - len(task.parse_answer(whole) or [])]
    assert whole.endswith("\nThe goal is reached.")
    assert task.parse_answer(whole) == plain_plan(read_text(row["question"]))


def test_the_direct_prompt_is_the_problem_alone() -> None:
    task = DirectBlocksworld()
    question = task.instance(3)["question"]
    prompt = task.prompt("chain", task.start(question))
    assert [message.role for message in prompt] == ["user", "assistant"]
    assert prompt[0].content == question


_EVENTS = (
    (r"loses (\d+) of them", int.__sub__),
    (r"finds (\d+) more", int.__add__),
    (r"wins as many as s?he already has", lambda count: 2 * count),
    (r"buys (\d+) bags with (\d+) \w+ each", lambda count, bags, size: count + bags * size),
    (r"puts them into (\d+) equal piles and keeps one pile", int.__floordiv__),
)


@pytest.mark.parametrize("seed", range(10))
def test_a_made_up_word_problem_has_the_answer_of_its_story(seed: int) -> None:
    task = WordProblems()
    row = task.instance(seed)
    assert row == task.instance(seed)
    first, *events = row["question"].split(". ")[:-1]
    count = int(re.findall(r"\d+", first)[0])
    for event in events:
        match, result = next((match, result) for form, result in _EVENTS if (match := re.search(form, event)))
        count = result(count, *map(int, match.groups()))
        assert count > 0
    assert task.score(row["answer"], str(count)) == 1.0
    solution = row["solution"]
    assert task.score(task.parse_answer(solution), row["answer"]) == 1.0
    assert solution.endswith(f"{task.triggers['chain']} {count}.")
    formulas = re.findall(r"(\d+) ([-+*/]) (\d+) = (\d+)", solution)
    kinds = {"-": int.__sub__, "+": int.__add__, "*": int.__mul__, "/": int.__truediv__}
    assert len(formulas) == solution.count("Sub-answer") >= 1
    assert all(kinds[sign](int(left), int(right)) == int(equal) for left, sign, right, equal in formulas)


def test_instances_are_distinct_and_exclude_those_of_another_file(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    first, second = tmp_path / "first.jsonl", tmp_path / "second.jsonl"
    assert main(["instances", "blocksworld", "--count", "60", "--out", str(first)]) == 0
    assert main(["instances", "blocksworld", "--count", "30", "--out", str(second), "--without", str(first)]) == 0
    questions = [[json.loads(line)["question"] for line in path.read_text().splitlines()] for path in (first, second)]
    assert [len(set(some)) for some in questions] == [60, 30]
    assert not set(questions[0]) & set(questions[1])
    assert main(["instances", "creative_writing", "--out", str(first)]) == 2
    assert "can't generate questions" in capfd.readouterr().err


def test_a_generated_function_is_judged_by_tests_that_its_question_does_not_show() -> None:
    task = Code()
    rows = {row["question"].split("(")[0].split()[-1]: row for row in distinct_rows(ListFunctions)}
    assert len(rows) == 40
    row = rows["sum_odd"]
    shown = examples(row["question"])
    assert len(shown) == 3
    assert not any(line in row["answer"] for line in shown)
    program = "def sum_odd(numbers):\n    return sum(x for x in numbers if x % 2 == {})\n"
    assert task.score(program.format(1), row["answer"]) == 1.0
    assert task.score(program.format(0), row["answer"]) == 0.0


def test_too_few_distinct_questions_are_an_error(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "few.py").write_text(
        "from tot import Task\n\n\nclass Few(Task):\n    templates = {'chain': '{{ question }}'}\n\n"
        "    def instance(self, seed):\n        return {'question': str(seed % 5)}\n"
    )
    out = tmp_path / "out.jsonl"
    assert main(["instances", f"{tmp_path / 'few.py'}:Few", "--count", "6", "--out", str(out)]) == 2
    assert "hardly more than the 5 questions" in capfd.readouterr().err
    assert len(out.read_text().splitlines()) == 5
