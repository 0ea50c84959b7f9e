"""Prompts for chat models: every task has them, with one user message and the model's text continued as a prefix."""

from __future__ import annotations

from typing import Any

import pytest

from tot import Task, Thought, load_task, solve
from tot.decoders import OptionError
from tot.tasks import GSM8K, MultipleChoice

TASKS = ["ask", "math", "gsm8k", "multiple_choice", "creative_writing", "blocksworld", "game24"]
IN_PIECES = ["ask", "math", "gsm8k", "multiple_choice"]


def rendered(task: Task, template: str, thought: Thought | None = None, **variables: Any) -> Any:
    state = task.start(task.example())
    return task.prompt(template, state if thought is None else state.then(thought), **variables)


@pytest.mark.parametrize("name", TASKS)
def test_solution_prompts_have_no_demonstrations(name: str) -> None:
    papers, chat = rendered(load_task(name), "chain"), rendered(load_task(name).with_prompts("chat"), "chain")
    assert chat[0].role == "user"
    assert len(chat[0].content) < len(papers[0].content) / 1.5
    last = load_task(name).start(load_task(name).example()).question.split()[-1]
    assert last.strip("(). ") in chat[0].content


@pytest.mark.parametrize("name", TASKS)
@pytest.mark.parametrize("template", ["value", "vote", "answer", "explain"])
def test_every_prompt_renders_after_a_solution(name: str, template: str) -> None:
    task = load_task(name).with_prompts("chat")
    about: dict[str, Any] = {"candidates": ["one", "two"]} if template == "vote" else {}
    parts = {"chain": "So it is."} if template in ("value", "explain") else {}
    if template in ("answer", "explain") and template not in task.prompts:
        pytest.skip("it has no such template")
    messages = rendered(task, template, Thought(parts={"chain": "So it is."}), **about, **parts)
    assert (
        "So it is." in messages[-1].content
        or template == "vote"
        or name in ("blocksworld", "game24", "creative_writing")
    )


@pytest.mark.parametrize("name", IN_PIECES)
def test_pieces_form_one_assistant_message(name: str) -> None:
    task = load_task(name).with_prompts("chat")
    assert task.generator.startswith("continue")
    state = task.start(task.example())
    assert [message.role for message in task.prompt("step", state)] == ["user"]
    for piece in ("First.\n\n", "Then "):
        state = state.then(Thought(parts={"step": piece}))
    for template in ("step", "chain", "answer"):
        assert task.prompt(template, state)[-1].model_dump(include={"role", "content"}) == {
            "role": "assistant",
            "content": "First.\n\nThen ",
        }
    assert task.prompt("step", state, step="go")[-1].content == "First.\n\nThen go"


@pytest.mark.parametrize("name", IN_PIECES)
@pytest.mark.parametrize("template", ["value", "explain", "self_eval", "vote"])
def test_evaluation_prompts_contain_pieces_and_no_demonstrations(name: str, template: str) -> None:
    task, piece = load_task(name).with_prompts("chat"), Thought(parts={"step": "Then 63 - 15 = 48."})
    about: dict[str, Any] = {"candidates": [piece.text, "No."]} if template == "vote" else {"step": piece.text}
    (message,) = rendered(task, template, piece, **about)
    assert message.role == "user"
    assert message.content.count(piece.text) == 1
    assert message.content.startswith(task.start(task.example()).question)


def test_a_custom_task_needs_its_own_chat_prompts() -> None:
    class Mine(GSM8K):
        templates = {"chain": "my {{ question }}"}  # noqa: RUF012

    class Other(GSM8K):
        depth = 3

    with pytest.raises(OptionError, match="task Mine has no prompts for chat models"):
        solve(Mine, "q", model=None, prompts="chat")
    assert Other().with_prompts("chat").thought == ("step",)
    with pytest.raises(OptionError, match="prompts"):
        solve(GSM8K, "q", model=None, prompts="poems")


@pytest.mark.parametrize(
    ("message", "answered", "answer"),
    [
        ("5 is too much.\n\\[ \\boxed{B} \\]\nNot (A).", True, "B"),
        ("So \\boxed{\\text{C}}.", False, "C"),
        ("So \\boxed{(D) 12}\n", True, "D"),
        ("\\boxed{12}, so the answer is (A)\n", False, "A"),
    ],
)
def test_a_boxed_letter_is_the_choice(message: str, answered: bool, answer: str) -> None:
    assert MultipleChoice().is_answered(message) is answered
    assert MultipleChoice().parse_answer(message) == answer
