"""Question: a request, and functions that read and score its answers; rationales of rows, and whole solutions."""

from __future__ import annotations

import random
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from tot.decoders.errors import OptionError
from tot.decoders.request import Completion, Request, Sampling
from tot.evaluation.data import rows
from tot.evaluation.solutions import Asked
from tot.registry import load_task
from tot.task.checked import CheckedTask
from tot.task.task import Task

_ANSWER_TOKENS = 12


@dataclass(frozen=True)
class Question:
    """A request with the parser and the score of its answers."""

    request: Request
    parse: Callable[[str], Any]
    """Return the answer in a text, or None."""
    canonical: Callable[[Any], Hashable]
    """Return a key that equivalent answers share."""
    score: Callable[[Any], float]
    """Return the score of an answer or None, from 0 to 1."""

    def answer(self, completion: Completion) -> Any | None:
        """Return the most likely choice, otherwise the answer in the text, of a rationale after its trigger."""
        if completion.choice_logprobs:
            scores = [choice.total for choice in completion.choice_logprobs]
            return self.request.choices[scores.index(max(scores))].strip()
        trigger = self.request.answer_trigger
        return self.parse(completion.text if trigger is None else f"{trigger}{completion.answer}")

    def read(self, answer: Any | None) -> str | None:
        """Return an answer in canonical form for comparisons; None if it is missing."""
        return None if answer is None else str(self.canonical(answer))


def scored(asked: Asked) -> Question:
    """Return a request for a whole solution with the parser and the score of its task."""
    return _question(asked.task, asked.request, asked.task.reference_of(asked.row))


def rationales(task: Task, data: Sequence[dict[str, Any]], max_tokens: int, chat: bool = False) -> list[Question]:
    """Return greedy requests for the rationale of each row, with the task's `chain` template.

    Raises OptionError for a task without a trigger for this template.
    """
    checked = CheckedTask(task.with_prompts("chat") if chat else task)
    trigger = checked.triggers.get("chain")
    if trigger is None:
        raise OptionError(f"task {type(task).__name__} has no answer trigger for its template 'chain': set `triggers`")
    result = []
    for row in data:
        state = checked.start(checked.question_of(row))
        sampling = {**checked.sampling.get("chain", {}), "max_tokens": max_tokens, "temperature": 0.0}
        request = Request(
            prompt=checked.prompt("chain", state),
            sampling=Sampling(**{**sampling, "stop": (*sampling.get("stop", ()), trigger)}),
            purpose="answer",
            answer_trigger=trigger,
            answer_tokens=_ANSWER_TOKENS,
            choices=tuple(f" {choice}" for choice in checked.choices(state)),
        )
        result.append(_question(checked, request, checked.reference_of(row)))
    return result


def sampled_rationales(task: str, data: str, limit: int, max_tokens: int, chat: bool = False) -> list[Question]:
    """Return the rationales of a random selection of rows. Raises OptionError for fewer than two rows."""
    shuffled = list(rows(data))
    random.Random(0).shuffle(shuffled)
    result = rationales(load_task(task), list(islice(shuffled, limit)), max_tokens, chat)
    if len(result) < 2:
        raise OptionError(f"{data} has {len(result)} rows, but at least 2 are needed: give a larger file")
    return result


def _question(task: CheckedTask, request: Request, reference: Any) -> Question:
    def score(answer: Any) -> float:
        return task.score(answer, reference)

    return Question(request, task.parse_answer, task.canonical, score)
