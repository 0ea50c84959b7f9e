"""Questions of tasks as requests for whole solutions, for training and measuring decoders."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any

from tot.decoders.errors import OptionError, TaskError
from tot.decoders.request import Request, Sampling
from tot.decoders.training.caps import Answers, find_cap
from tot.decoders.training.question import Question
from tot.evaluation.data import rows
from tot.evaluation.estimate import estimate, paired
from tot.registry import load_task
from tot.task.checked import CheckedTask
from tot.task.task import Task

NO_QUESTIONS = "there are no questions: give --questions TASK=FILE, with more rows than --offset"
_ANSWER_TOKENS = 12


def solutions(sources: Sequence[str], max_tokens: int, known: bool = False) -> Iterator[Question]:
    """Yield greedy requests for whole solutions (a task's `chain` template), from "task=file" pairs.

    `known` adds the rows' own solutions. Raises OptionError for an invalid pair or row, and TaskError for a task
    without the template, or a row without a solution.
    """
    for source in sources:
        name, equals, path = source.partition("=")
        if not equals:
            raise OptionError(f"--questions {source!r} can't be read: write TASK=FILE, such as gsm8k=train.jsonl")
        task = load_task(name)
        for row in rows(path):
            try:
                question, reference = task.question_of(row), task.reference_of(row)
            except KeyError as error:
                raise OptionError(
                    f"{path} has a row without {error} (it has {', '.join(row)}): give a file of {name} questions"
                ) from None
            checked = CheckedTask(task)
            limits = {"max_tokens": max_tokens, **checked.sampling.get("chain", {})}
            sampling = Sampling(**{**limits, "max_tokens": min(max_tokens, int(limits["max_tokens"]))})
            request = Request(prompt=checked.prompt("chain", checked.start(question)), sampling=sampling)
            if known and "solution" not in row:
                raise TaskError(f"a row of {type(task).__name__} has no solution: give rows with a `solution`")
            yield _question(checked, request, reference, str(row["solution"]) if known else None)


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


def _question(task: CheckedTask, request: Request, reference: Any, solution: str | None = None) -> Question:
    def score(answer: Any) -> float:
        return task.score(answer, reference)

    return Question(request, task.parse_answer, task.canonical, score, solution)


def against_whole(answers: Answers) -> tuple[str, float]:
    """Describe accuracy and agreement against whole rationales; also return the difference's lower bound."""
    change = paired([score - full for score, full in zip(answers.scores, answers.full, strict=True)])
    texts = [estimate(values).format(".0%") for values in (answers.scores, answers.full, answers.unchanged)]
    difference = f"{100 * change.low:.0f} to {100 * change.high:.0f} points"
    note = f"accuracy {texts[0]}, with whole rationales {texts[1]}, difference {difference}"
    return f"{note}; {texts[2]} of the answers unchanged", change.low


def described_cap(
    iterations: Sequence[int], answers: Sequence[Answers], loss: float, agreement: float | None = None
) -> tuple[int | None, str]:
    """Return the cap of a stop rule, as `find_cap` does, and a description."""
    cap = find_cap(iterations, answers, loss, agreement)
    if cap is None:
        kept = "" if agreement is None else f" and {100 * agreement:g}% of the answers"
        return None, f"no cap keeps accuracy within {100 * loss:g} points{kept}"
    note, low = against_whole(answers[iterations.index(cap)])
    if low < -loss:
        count = len(answers[0].given)
        note += f"; {count} questions are too few to guarantee a loss of at most {100 * loss:g} points"
    return cap, f"cap {cap}: {note}"
