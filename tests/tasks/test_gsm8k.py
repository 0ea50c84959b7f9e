"""GSM8K: prompts, scores against real references, and a real search."""

from __future__ import annotations

import ast
import asyncio
import json
import re
from pathlib import Path
from typing import Any

import pytest

from tot import State, Thought
from tot.sandbox import Sandbox
from tot.task.checked import CheckedTask
from tot.tasks.gsm8k import GSM8K


@pytest.fixture(scope="module")
def task() -> GSM8K:
    return GSM8K()


@pytest.fixture(scope="module")
def rows(data: Path) -> list[dict[str, str]]:
    """The first 400 rows of the test set."""
    text = (data / "gsm8k_test_0_400.jsonl").read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()]


# -- prompts ----------------------------------------------------------------------------------------------------


def test_the_demonstrations_have_the_format_that_is_parsed(task: GSM8K) -> None:
    head = task.prompt("answer", State(question="How many marbles?"))[0].content
    first = task.prompts.data("demonstrations")[0]
    steps = [
        line
        for number, step in enumerate(first["steps"], 1)
        for line in (f"Sub-question {number}: {step['sub_question']}", f"Sub-answer {number}: {step['sub_answer']}")
    ]
    written = "\n".join([f"Question: {first['question']}", *steps, f"The answer is {first['answer']}."])
    assert f"\n\n{written}\n\nQuestion: " in head
    assert "\n\n\n" not in head


def test_a_step_is_one_line(task: GSM8K) -> None:
    assert all(task.sampling[template]["stop"] == ("\n",) for template in (*task.thought, "answer"))
    assert task.parse_thought("sub_answer", " 3 + 4 = 7. ") == "3 + 4 = 7."
    assert task.parse_thought("sub_answer", "  ") is None


def test_the_demonstrations_compute_correctly_and_end_in_their_answer(task: GSM8K) -> None:
    sums = 0
    for demonstration in task.prompts.data("demonstrations"):
        for step in demonstration["steps"]:
            for left, right in re.findall(r"(\d+(?: [-+*/] \d+)+) = \$?(\d+)", step["sub_answer"]):
                sums += 1
                assert arithmetic(ast.parse(left, mode="eval").body) == int(right)
        assert demonstration["answer"] in re.findall(r"\d+", demonstration["steps"][-1]["sub_answer"])
    assert sums >= 8


def arithmetic(node: Any) -> float:
    """Evaluate numbers joined by + - * and /."""
    if isinstance(node, ast.Constant):
        return float(node.value)
    a, b = arithmetic(node.left), arithmetic(node.right)
    return {ast.Add: a + b, ast.Sub: a - b, ast.Mult: a * b, ast.Div: a / b}[type(node.op)]


def test_the_task_has_an_example_question(task: GSM8K) -> None:
    questions = task.prompts.data("questions")
    assert task.example() == questions[0]["question"]
    assert all(task.score(entry["answer"], entry["answer"]) == 1 for entry in questions)


# -- scores -----------------------------------------------------------------------------------------------------


def test_every_reference_scores_1_against_itself_and_0_against_its_neighbour(
    task: GSM8K, rows: list[dict[str, str]]
) -> None:
    assert len(rows) == 400
    answers = [task.parse_answer(row["answer"]) for row in rows]
    assert [task.score(answer, row["answer"]) for answer, row in zip(answers, rows, strict=True)] == [1.0] * 400
    for row, answer, other in zip(rows, answers, answers[1:] + answers[:1], strict=True):
        assert answer is not None
        assert row["answer"].replace(",", "").endswith(f"#### {answer}")
        assert task.score(other, row["answer"]) == float(other == answer)
        assert task.score(f"{answer}1", row["answer"]) == 0


# -- a real search ----------------------------------------------------------------------------------------------


# -- programs ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("reply", "observation", "answer"),
    [
        ("```python\nn = 3 * 12\nprint(n - 5)\n```", "31", "31"),
        ("n = 3 * 12\nprint('Eggs:', n / 2)", "Eggs: 18.0", "18"),
        ("```python\nprint(eggs)\n```", "NameError: name 'eggs' is not defined", None),
        ("```python\nprint(1)\nwhile True: pass\n```", "The program can't be run to its end (time).", None),
        ("The answer is 31.", "SyntaxError: invalid syntax", None),
        ("```python\nn = 31\n```", "", None),
        ("```python\nprint('many')\n```", "many", None),
        ("", "", None),
    ],
)
def test_the_observation_of_a_program_is_its_last_output(
    task: GSM8K, monkeypatch: pytest.MonkeyPatch, reply: str, observation: str, answer: str | None
) -> None:
    seconds = 1 if "while True" in reply else 60
    monkeypatch.setattr("tot.tasks.printed.SANDBOX", Sandbox(seconds=seconds))
    state, thought = task.start("How many eggs?"), Thought(parts={"program": reply}, ended=True)
    seen = asyncio.run(task.act(state, thought))
    assert seen is not None
    assert (seen.text, seen.data, seen.verified) == (observation, answer, False)
    after = state.then(thought.model_copy(update={"observation": seen}))
    assert CheckedTask(task).answer_at(after) == answer


def test_a_thought_that_is_not_a_program_is_not_executed(task: GSM8K) -> None:
    assert asyncio.run(task.act(task.start("How many?"), Thought(parts={"chain": "print(1)"}))) is None


@pytest.mark.parametrize("prompts", [GSM8K(), GSM8K().with_prompts("chat")], ids=["papers", "chat"])
def test_program_prompts_stop_at_the_end_of_the_code_block(prompts: GSM8K) -> None:
    *_, user, prefix = prompts.prompt("program", prompts.start("How many eggs?"))
    assert "How many eggs?" in user.content
    assert (prefix.role, prefix.content) == ("assistant", "```python")
    assert "\n```" in prompts.sampling["program"]["stop"]
