"""Parsers and scores: a case a line of texts.jsonl, [function, arguments, result]."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tot.task.parsing import parse_proposals, parse_value, parse_vote
from tot.tasks import GSM8K, Ask, Blocksworld, CreativeWriting, Game24, MultipleChoice
from tot.tasks.arithmetic import evaluate
from tot.tasks.ask import short_answer
from tot.tasks.blocks import parse_action
from tot.tasks.code import examples, program_in
from tot.tasks.formulas import boxed
from tot.tasks.number_answers import normalize, same_number, strict_answer
from tot.tasks.sentences import paragraphs, split

TASKS = {task.name: task for task in (Ask(), Blocksworld(), CreativeWriting(), Game24(), GSM8K(), MultipleChoice())}
METHODS = ("is_answered", "parse_answer", "parse_truncated", "parse_value", "score", "verify")
FUNCTIONS: dict[str, Callable[..., Any]] = {
    **{
        f"{name}.{method}": getattr(task, method)
        for name, task in TASKS.items()
        for method in METHODS
        if hasattr(task, method)
    },
    "ask.same_ballot": lambda question, one, other: len({*TASKS["ask"].elect(question, [one, other], [1, 1])[0]}) == 1,  # type: ignore[attr-defined]
    "ask.short_answer": short_answer,
    "blocks.action": lambda text: (action := parse_action(text)) and action.pddl,
    "blocksworld.action": lambda text: TASKS["blocksworld"].parse_thought("action", text),
    "boxed": boxed,
    "evaluate": lambda text: None if (value := evaluate(text)) is None else str(value),
    "examples": examples,
    "game24.move": lambda text: TASKS["game24"].parse_thought("move", text),
    "game24.solves": lambda puzzle, text: TASKS["game24"].verify(puzzle, TASKS["game24"].parse_answer(text)),
    "gsm8k.sub_question": lambda text: TASKS["gsm8k"].parse_thought("sub_question", text),
    "normalize": normalize,
    "paragraphs": paragraphs,
    "parse_proposals": parse_proposals,
    "parse_value": parse_value,
    "parse_vote": parse_vote,
    "program_in": program_in,
    "same_number": same_number,
    "split": split,
    "strict_answer": strict_answer,
}
CASES = [
    json.loads(line) for line in Path(__file__).with_name("texts.jsonl").read_text(encoding="utf-8").split("\n") if line
]


@pytest.mark.parametrize(("function", "arguments", "result"), CASES)
def test_a_text_is_read(function: str, arguments: list[Any], result: Any) -> None:
    found = FUNCTIONS[function](*arguments)
    assert (list(found) if isinstance(found, tuple) else found) == result
