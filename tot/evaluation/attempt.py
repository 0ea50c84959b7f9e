"""Search and score questions in this process: the samples that an evaluation writes. Independent of its folder."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import ExitStack, asynccontextmanager
from dataclasses import asdict
from typing import Any

from tot.decoders.decoder import Decoder
from tot.decoders.errors import ModelError, OptionError, describe
from tot.decoders.request import Purpose, Usage
from tot.evaluation.config import EvaluationRun
from tot.evaluation.questions import Question
from tot.llm.context import derive
from tot.llm.decoders import open_decoders_in_thread
from tot.run import Run, Watcher
from tot.sandbox import pool

Pending = Iterator[tuple[Question, int]]
"""Pairs of a question and the number of its repeat."""
Finish = Callable[[dict[str, Any], dict[str, Any] | None, Run | None], None]
"""Receives a sample, its tree as JSON data, and the search if it ran in this process."""


@asynccontextmanager
async def task_group() -> AsyncIterator[asyncio.TaskGroup]:
    """Yield a group of tasks of which the first error is raised alone, once the other tasks are cancelled."""
    try:
        async with asyncio.TaskGroup() as group:
            yield group
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None


async def search_here(evaluation: EvaluationRun, pending: Pending, finish: Finish, watch: Watcher) -> None:
    """Search all pending questions on one engine, with the configured concurrency.

    Calls `watch` with each search when it starts, and `finish` when it ends, in any order. On cancellation, stops the
    running searches. Raises TotError for problems that affect every question.
    """
    with ExitStack() as stack:
        decoders = await open_decoders_in_thread(evaluation.config.model, stack)

        async def work() -> None:
            for question, repeat in pending:
                sample, run = await attempt(evaluation, question, repeat, decoders, watch)
                finish(sample, None if run is None else run.tree.to_json(), run)

        async with task_group() as group:
            for _ in range(evaluation.options.concurrency):
                group.create_task(work())


async def attempt(
    evaluation: EvaluationRun,
    question: Question,
    repeat: int,
    decoders: Mapping[Purpose, Decoder],
    watch: Watcher | None = None,
) -> tuple[dict[str, Any], Run | None]:
    """Search a question and score the answer. Return the sample, and the search or None if it could not start.

    Values that depend on the machine or on concurrent searches are under `measured`, the last entry. The other entries
    are identical in every reproducible run. Raises ModelError and OptionError, which would affect every question.
    """
    config, task = evaluation.config, evaluation.task
    sample = _unanswered(question, repeat)
    run: Run | None = None
    try:
        seed = derive(config.seed, question.index, repeat)
        parts, filters = evaluation.parts, evaluation.filters
        run = Run(task, question.text, config, decoders, parts, filters, seed=seed, watch=watch)
        solution = await run.solve()
        in_text = run.answers.asks or parts["search"].whole  # otherwise the states contain the answers
        unread = solution.answer is None and solution.calls > 0 and in_text
        sample |= {
            "answer": solution.summary()["answer"],
            "certainty": solution.certainty,
            "solved": solution.solved,
            "parse_failure": unread and not (solution.stopped or "").startswith("budget:"),
            "unreadable": solution.parse_failures,
            "stopped": solution.stopped,
        }
        if evaluation.judge is not None and solution.answer is not None:
            rated = await evaluation.judge.evaluate(run.context.to("evaluate"), [run.search.best])
            sample["judged"] = rated[0].value
        score, loop = run.search.checked.score, asyncio.get_running_loop()
        sample["score"] = await loop.run_in_executor(pool(), score, solution.answer, question.reference)
    except (ModelError, OptionError):
        raise
    except Exception as error:  # a task's own code may raise anything; only this question fails  # noqa: BLE001
        sample["error"] = describe(error)
    if run is not None:
        backend = run.backend
        sample |= {"thoughts": len(run.tree) - 1, "usage": backend.by_purpose}
        sample |= {"by_model": backend.by_model} if backend.models else {}
    return sample | {"measured": _measured(Usage() if run is None else run.meter.total)}, run


def lost_sample(question: Question, repeat: int, reason: str) -> dict[str, Any]:
    """Return the sample of a search that returned no result."""
    return _unanswered(question, repeat) | {"error": reason, "measured": _measured(Usage())}


def _unanswered(question: Question, repeat: int) -> dict[str, Any]:
    return {
        "id": f"{question.index}-{repeat}",
        "index": question.index,
        "repeat": repeat,
        "question": question.text,
        "reference": question.reference,
        "answer": None,
        "certainty": None,
        "score": 0.0,
        "solved": False,
        "parse_failure": False,
        "unreadable": 0,
        "thoughts": 0,
        "stopped": None,
        "error": None,
        "usage": {},
    }


def _measured(usage: Usage) -> dict[str, Any]:
    return {name: value for name, value in asdict(usage).items() if name not in ("prompt_tokens", "new_tokens")}
