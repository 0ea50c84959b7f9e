"""Every task parses any reply: without an error, and in time that is linear in the text."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tot import Task, load_task
from tot.task.checked import CheckedTask

NAMES = ("ask", "blocksworld", "code", "creative_writing", "game24", "gsm8k", "multiple_choice")
TASKS = {name: load_task(name) for name in NAMES}
PIECES = (
    r"answer is |ABIab|).(:|*$|\boxed{|}|option |1 + 1 = 2 |0.5/|× |stack a on b|then |(pick-up a)|#### |12,|Passage: |"
    r"score is |8/10 |Action 1: |```python|def f(x):|    return x|<<<<<<< SEARCH|>>> f(1)|not |jan 1 |$5 |²"
)
UNITS = (
    r"1 + 1 = 2 |1|(|1 +|answer |= |-|passage: |score is |*|8/10 |. |The score of |(A|A) |option |'|A is |a-|1/|x+|"
    r"$|\text|stack a on b then |jan 1 |the |\boxed{|#### |5 apples + |answer is 5 x |```"
)


def parsed(task: Task, text: str) -> list[Any]:
    """Return the result of each parser for a reply: an answer, a truncated answer, thoughts and a value."""
    checked = CheckedTask(task)
    thought = checked.parse_thought(task.thought[0], text)
    return [
        checked.answer_in(text),
        checked.answer_in(text, truncated=True),
        checked.parse_value(text),
        [] if thought is None else [thought],
        checked.parse_proposals(text),
    ]


@pytest.mark.parametrize("name", NAMES)
@given(
    text=st.text()
    | st.lists(st.sampled_from([*PIECES.split("|"), "\n", "\0", "\ud800"]) | st.text(max_size=4), max_size=30).map(
        "".join
    )
)
def test_any_reply_is_parsed(name: str, text: str) -> None:
    task = TASKS[name]
    answer, _, _, thoughts, _ = parsed(task, text)
    assert answer is None or task.canonical(answer) == task.canonical(answer)
    if name in ("blocksworld", "game24"):  # thoughts in canonical form
        assert [task.parse_thought(task.thought[0], thought) for thought in thoughts] == thoughts


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", [name for name in NAMES if name != "code"])  # the tests of code have their own
def test_a_hostile_reply_takes_linear_time(name: str) -> None:
    for unit in [*UNITS.split("|"), "\n", "\nA) x", "```\n"]:
        parsed(TASKS[name], unit * (50_000 // len(unit)))


@pytest.mark.parametrize("name", ["blocksworld", "creative_writing", "game24", "gsm8k", "multiple_choice"])
def test_all_few_shot_prompts_about_a_question_begin_with_the_same_message(name: str) -> None:
    """So that a decoder computes the demonstrations once."""
    task = TASKS[name]
    state = task.start(task.example())
    about = dict.fromkeys((*task.thought, "sub_question"), "This.") | {"candidates": ["One.", "Two."], "count": 3}
    templates = [*task.thought, "value", "vote", "propose", "chain"]
    heads = {task.prompt(template, state, **about)[0].content for template in templates}
    assert len(heads) == 1
    assert task.variables(state)["question"].splitlines()[-1].split()[-1] in heads.pop()[-60:]


@pytest.mark.parametrize(
    ("name", "file"),
    [("gsm8k", "gsm8k_test_0_400.jsonl"), ("game24", "game24.csv"), ("blocksworld", "blocksworld_dev.jsonl")],
)
def test_demonstrations_are_not_from_the_data_set(name: str, file: str, data: Any) -> None:
    from tot.evaluation.data import rows

    task = TASKS[name]
    known = [row for part in ("questions", "demonstrations") for row in _rows(task.prompts.data(part))]
    ours = {_normal(task, task.question_of(row)) for row in known}
    assert len(ours) >= 3
    assert not ours & {_normal(task, task.question_of(row)) for row in rows(data / file)}


def _rows(content: Any) -> list[dict[str, Any]]:
    return content["solutions"] if isinstance(content, dict) else content


def _normal(task: Task, question: str) -> str:
    normal = str(task.variables(task.start(question))["question"])
    return " ".join(sorted(normal.split())) if task.name == "game24" else normal
