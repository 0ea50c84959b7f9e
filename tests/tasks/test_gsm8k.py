"""GSM8K: prompts, scores against real references, and a real search."""

from __future__ import annotations

import ast
import asyncio
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tot import BFS, Likelihood, Solution, State, Thought, load_decoder, solve
from tot.decoders import LocalDecoder
from tot.sandbox import Sandbox
from tot.task.checked import CheckedTask
from tot.tasks.gsm8k import GSM8K

THOUGHTS = (
    Thought(parts={"sub_question": "How many red?", "sub_answer": "4 * 2 = 8 red."}),
    Thought(parts={"sub_question": "How many blue?", "sub_answer": "8 - 3 = 5 blue."}),
)
TEMPLATES = ("sub_question", "sub_answer", "value", "answer")


@pytest.fixture(scope="module")
def task() -> GSM8K:
    return GSM8K()


@pytest.fixture(scope="module")
def rows(data: Path) -> list[dict[str, str]]:
    """The first 400 rows of the test set."""
    text = (data / "gsm8k_test_0_400.jsonl").read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()]


def prompt(task: GSM8K, template: str, thoughts: int = 0, **parts: str) -> dict[str, str]:
    state = State(question="How many marbles?", thoughts=THOUGHTS[:thoughts])
    return {message.role: message.content for message in task.prompt(template, state, **parts)}


# -- prompts ----------------------------------------------------------------------------------------------------


def test_all_prompts_about_a_question_begin_with_the_same_message(task: GSM8K) -> None:
    heads = {
        prompt(task, template, thoughts, **({"sub_question": "How?"} if template == "sub_answer" else {}))["user"]
        for template in TEMPLATES
        for thoughts in (0, 1, 2)
    }
    assert len(heads) == 1
    (head,) = heads
    assert head.endswith("\n\nQuestion: How many marbles?")
    assert head.count("Question: ") == len(task.data("demonstrations")) + 1


def test_the_demonstrations_have_the_format_that_is_parsed(task: GSM8K) -> None:
    head = prompt(task, "answer")["user"]
    first = task.data("demonstrations")[0]
    steps = [
        line
        for number, step in enumerate(first["steps"], 1)
        for line in (f"Sub-question {number}: {step['sub_question']}", f"Sub-answer {number}: {step['sub_answer']}")
    ]
    written = "\n".join([f"Question: {first['question']}", *steps, f"The answer is {first['answer']}."])
    assert f"\n\n{written}\n\nQuestion: " in head
    assert "\n\n\n" not in head


@pytest.mark.parametrize(
    ("template", "thoughts", "parts", "prefix"),
    [
        ("sub_question", 0, {}, "Sub-question 1:"),
        ("sub_answer", 0, {"sub_question": "How many red?"}, "Sub-question 1: How many red?\nSub-answer 1:"),
        ("answer", 0, {}, "The answer is"),
        (
            "sub_question",
            1,
            {},
            "Sub-question 1: How many red?\nSub-answer 1: 4 * 2 = 8 red.\nSub-question 2:",
        ),
        (
            "sub_answer",
            1,
            {"sub_question": "And?"},
            "Sub-question 1: How many red?\nSub-answer 1: 4 * 2 = 8 red.\nSub-question 2: And?\nSub-answer 2:",
        ),
        (
            "answer",
            2,
            {},
            "Sub-question 1: How many red?\nSub-answer 1: 4 * 2 = 8 red.\n"
            "Sub-question 2: How many blue?\nSub-answer 2: 8 - 3 = 5 blue.\nThe answer is",
        ),
    ],
)
def test_prompts_end_in_the_steps_so_far(
    task: GSM8K, template: str, thoughts: int, parts: dict[str, str], prefix: str
) -> None:
    assert prompt(task, template, thoughts, **parts)["assistant"] == prefix


def test_the_value_prompt_contains_the_steps_and_asks_for_a_number_on_the_scale(task: GSM8K) -> None:
    state = State(question="How many marbles?", thoughts=THOUGHTS)
    prefix_message = Likelihood().prompt(task, state)[-1]
    steps = prompt(task, "answer", 2)["assistant"].removesuffix("The answer is")
    assert prefix_message.role == "assistant"
    assert prefix_message.content.startswith(steps)
    wish = prefix_message.content.removeprefix(steps)
    low, high = task.scale
    assert re.search(rf"\b{low}\b.*\b{high}\b", wish)
    assert wish == wish.rstrip()
    assert not wish.endswith(".")  # " 7" can follow


def test_a_step_is_one_line(task: GSM8K) -> None:
    assert all(task.sampling[template]["stop"] == ("\n",) for template in (*task.thought, "answer"))
    assert task.parse_thought("sub_answer", " 3 + 4 = 7. ") == "3 + 4 = 7."
    assert task.parse_thought("sub_answer", "  ") is None


def test_the_demonstrations_compute_correctly_and_end_in_their_answer(task: GSM8K) -> None:
    sums = 0
    for demonstration in task.data("demonstrations"):
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
    questions = task.data("questions")
    assert task.example() == questions[0]["question"]
    assert all(task.score(entry["answer"], entry["answer"]) == 1 for entry in questions)


def test_demonstrations_are_not_from_the_data_set(task: GSM8K, rows: list[dict[str, str]]) -> None:
    theirs = {row["question"] for row in rows}
    assert not theirs & {entry["question"] for name in ("questions", "demonstrations") for entry in task.data(name)}


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


@pytest.mark.parametrize(
    ("text", "thought"),
    [
        (" How many red?", "How many red?"),
        ("How many red? Sub-answer 2: 4", "How many red?"),
        ("How many? How many left?", "How many?"),
        ("There are 8 red balls.", None),
        ("Sub-question 3:", None),
        ("??", None),
        ("", None),
    ],
)
def test_a_sub_question_ends_at_its_first_question_mark(text: str, thought: str | None) -> None:
    assert GSM8K().parse_thought("sub_question", text) == thought
    assert GSM8K().parse_thought("sub_answer", text) == (text.strip() or None)


@pytest.mark.parametrize(
    ("answer", "reference", "score"),
    [
        ("18", "9 + 9 = <<9+9=18>>18\n#### 18", 1),
        ("18.0", "#### 18", 1),
        ("$1,234", "#### 1,234", 1),
        ("19", "#### 18", 0),
        ("-18", "#### 18", 0),
        ("18 apples", "#### 18", 0),
        ("", "#### 18", 0),
        (None, "#### 18", 0),
        ("18", "18", 1),
        ("18", "no number", 0),
    ],
)
def test_an_answer_is_correct_if_the_numbers_are_equal(
    task: GSM8K, answer: str | None, reference: str, score: float
) -> None:
    assert task.score(answer, reference) == score


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("Sub-answer 1: 3 * 4 = 12.\nThe answer is  12 apples.", "12"),
        ("Sub-answer 1: 3 * 4 = 12.\nThe answer is 2 * 12 = $24.", "24"),
        ("so 5\n#### 7", "7"),
        ("#### 7\nThe answer is 5, I mean.", "7"),
        ("nothing", None),
    ],
)
def test_the_answer_is_the_announced_number(task: GSM8K, text: str, answer: str | None) -> None:
    assert task.parse_answer(text) == answer


@pytest.mark.parametrize(
    ("reply", "value"), [(" 8.", 8), ("on a scale of 1 to 10: 7", 7), ("11", None), ("good", None)]
)
def test_a_value_is_a_number_on_the_scale(task: GSM8K, reply: str, value: float | None) -> None:
    assert task.parse_value(reply) == value


# -- a real search ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def decoder(smollm2: str) -> Iterator[LocalDecoder]:
    with load_decoder("ar", smollm2, dtype="fp32", kv_budget=4000) as decoder:
        yield decoder


def texts(solution: Solution) -> list[tuple[str, str]]:
    return [(solution.tree.place(node), node.thought.text if node.thought else "") for node in solution.tree]


@pytest.mark.real
def test_a_real_search_ends_with_an_answer_and_a_tree_of_the_right_shape(task: GSM8K, decoder: LocalDecoder) -> None:
    def run(seed: int, depth: int = 3) -> Solution:
        search = BFS(thoughts=2, breadth=1, depth=depth)
        return solve(task, task.example(), decoder=decoder, search=search, prompts="papers", max_tokens=10, seed=seed)

    first, again, other = run(1), run(1), run(2, depth=2)
    tree = first.tree
    for depth in (1, 2):
        level = [node for node in tree if node.depth == depth]
        expanded = [node for node in tree if node.depth == depth - 1 and tree.children(node)]
        assert len(expanded) == 1
        assert len(level) == 2 - expanded[0].parse_failures > 0
    assert max(node.depth for node in tree) == 2
    for node in tree:
        if node.thought is None:
            assert node.value is None
            continue
        assert list(node.thought.parts) == ["sub_question", "sub_answer"]
        assert all(part == part.strip() != "" and "\n" not in part for part in node.thought.parts.values())
        assert node.value is not None
        assert 1 <= node.value <= 10
        assert 2 <= node.usage.new_tokens <= 30  # the sub-question, the sub-answer and its number, 10 tokens each
    chosen = [node for node in tree if node.chosen]
    assert [node.depth for node in chosen] == [0, 1, 2]
    assert first.value == chosen[-1].value == max(node.value or 0 for node in tree if node.depth == 2)
    assert first.answer is not None
    assert task.score(first.answer, first.answer) == 1  # a number
    assert first.stopped is None

    assert texts(again) == texts(first)
    assert again.answer == first.answer
    assert [node.value or 0 for node in again.tree] == pytest.approx([node.value or 0 for node in tree], rel=1e-4)
    assert texts(other)[1:3] != texts(first)[1:3]
    assert again.usage.reused_prompt_tokens > first.usage.reused_prompt_tokens  # its prompts were cached


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
    monkeypatch.setattr("tot.tasks.gsm8k.SANDBOX", Sandbox(seconds=seconds))
    state, thought = task.start("How many eggs?"), Thought(parts={"program": reply}, ended=True)
    seen = asyncio.run(task.act(state, thought))
    assert seen is not None
    assert (seen.text, seen.data, seen.verified) == (observation, answer, False)
    after = state.then(thought.model_copy(update={"observation": seen}))
    assert CheckedTask(task).answer_at(after) == answer


def test_a_thought_that_is_not_a_program_is_not_executed(task: GSM8K) -> None:
    assert asyncio.run(task.act(task.start("How many?"), Thought(parts={"chain": "print(1)"}))) is None


@pytest.mark.parametrize("prompts", [GSM8K(), GSM8K().in_chat()], ids=["papers", "chat"])
def test_program_prompts_stop_at_the_end_of_the_code_block(prompts: GSM8K) -> None:
    *_, user, prefix = prompts.prompt("program", prompts.start("How many eggs?"))
    assert "How many eggs?" in user.content
    assert (prefix.role, prefix.content) == ("assistant", "```python")
    assert "\n```" in prompts.sampling["program"]["stop"]
