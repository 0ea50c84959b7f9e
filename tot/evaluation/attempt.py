"""What is to be done with each question, and one question searched and scored: the sample that is written of it.

It knows neither folders nor what else is under way. Objects given in Python are named for the configuration, so that a
resumed run can tell whether they are the same.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from tot.config import FILTERS, SearchConfig
from tot.decoders.budget import Budget, Meter
from tot.decoders.decoder import Decoder
from tot.decoders.errors import ModelError, OptionError
from tot.decoders.registry import declared
from tot.decoders.request import Purpose, Usage
from tot.evaluation.configuration import Configuration
from tot.evaluation.questions import Question
from tot.llm.backend import Backend
from tot.llm.seeds import derive
from tot.options import LOADING, SAME
from tot.sandbox import pool
from tot.search.session import SearchSession, Watcher
from tot.solver import conclude
from tot.task.task import Task

Pending = Iterator[tuple[Question, int]]
"""Questions, each with the number of its repeat."""
Finish = Callable[[dict[str, Any], dict[str, Any] | None, SearchSession | None], None]
"""Told of a sample, of its tree as JSON data, and of the search, where it ran in this process."""


@dataclass(frozen=True)
class Work:
    """A configuration, and what its names stand for."""

    configuration: Configuration
    task: Task
    config: SearchConfig

    @classmethod
    def named(cls, configuration: Configuration) -> Work:
        """From names alone. Raises TotError for those that mean nothing."""
        task, config = configuration.opened(configuration.task)
        return cls(configuration.model_copy(update={"prompts": task.prompts}), task, config)

    @classmethod
    def given(cls, task: Task | type[Task] | str, config: SearchConfig, options: Mapping[str, Any]) -> Work:
        """From names and objects; `options` are the configuration's other ones. Raises TotError."""
        name, task = task if isinstance(task, str) else None, config.suited(task)
        config = config.model_copy(update={"prompts": task.prompts})
        loading = {name: str(value) for name in LOADING if (value := config.model_options.get(name)) is not None}
        configuration = Configuration.from_options(
            {
                "task": name or _task_name(task),
                "model": _text(config.asked_model) or "none",
                "decoder_option": [
                    f"{name}={_text(value)}" for name, value in config.model_options.items() if name not in LOADING
                ],
                **{f"budget_{limit}": value for limit, value in (config.budget or Budget()).model_dump().items()},
                **{kind: _text(getattr(config, kind)) for kind in ("decoder", "search", "generator", "evaluator")},
                **{name: getattr(config, name) for name in SAME},
                "tool": [getattr(tool, "__name__", str(tool)) for tool in config.tools],
                **loading,
                **options,
            }
        )
        return cls(configuration, task, config.model_copy(update=config.parts(task)))


@asynccontextmanager
async def running(work: Iterable[Coroutine[Any, Any, Any]]) -> AsyncIterator[list[asyncio.Task[Any]]]:
    """Tasks side by side; those that still run when the block ends are cancelled, and waited for."""
    tasks = [asyncio.create_task(each) for each in work]
    try:
        yield tasks
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def attempt(
    work: Work, question: Question, repeat: int, decoders: Mapping[Purpose, Decoder], watch: Watcher | None = None
) -> tuple[dict[str, Any], SearchSession | None]:
    """Search a question, and score the answer: the sample as it is written, and the search, if it could begin.

    What depends on the machine and on what else ran is under `measured`, the last entry; in reproducible runs all
    before it is the same every time. Raises ModelError and OptionError, which no other question could do without.
    """
    config, task, loop = work.config, work.task, asyncio.get_running_loop()
    backend = Backend(decoders, Meter(config.budget))
    sample = _unanswered(question, repeat)
    session: SearchSession | None = None
    seed = derive(config.seed, question.index, repeat)
    try:
        session = SearchSession(
            task,
            question.text,
            backend,
            **config.parts(task),
            seed=seed,
            max_tokens=config.max_tokens,
            filters={name: value for name in FILTERS if (value := getattr(work.configuration, name)) is not None},
            watch=watch,
        )
        await session.run()
        solution = conclude(session, await session.answer())
        budget_ended = (solution.stopped or "").startswith("budget:")
        sample |= {
            "answer": solution.answer,
            "solved": solution.solved,
            "parse_failure": solution.answer is None and solution.calls > 0 and not budget_ended,
            "unreadable": solution.parse_failures,
            "stopped": solution.stopped,
        }
        score = session.search.checked.score
        sample["score"] = await loop.run_in_executor(pool(), score, solution.answer, question.reference)
    except (ModelError, OptionError):
        raise
    except Exception as error:  # one question's fault: a task's own code may raise anything  # noqa: BLE001
        sample["error"] = f"{type(error).__name__}: {error}"
    sample |= {
        "thoughts": 0 if session is None else len(session.tree) - 1,
        "usage": {
            purpose: {"calls": calls, "prompt_tokens": usage.prompt_tokens, "new_tokens": usage.new_tokens}
            for purpose, (calls, usage) in backend.spent.items()
        },
        "measured": _measured(backend.meter.total),
    }
    return sample, session


def lost_sample(question: Question, repeat: int, reason: str) -> dict[str, Any]:
    """The sample of a search that nothing came back from."""
    return _unanswered(question, repeat) | {"error": reason, "usage": {}, "measured": _measured(Usage())}


def _unanswered(question: Question, repeat: int) -> dict[str, Any]:
    return {
        "id": f"{question.index}-{repeat}",
        "index": question.index,
        "repeat": repeat,
        "question": question.text,
        "reference": question.reference,
        "answer": None,
        "score": 0.0,
        "solved": False,
        "parse_failure": False,
        "unreadable": 0,
        "thoughts": 0,
        "stopped": None,
        "error": None,
    }


def _measured(usage: Usage) -> dict[str, Any]:
    return {name: value for name, value in asdict(usage).items() if name not in ("prompt_tokens", "new_tokens")}


def _task_name(task: Task) -> str:
    """The name that `load_task` takes, where there is one."""
    place = f"{type(task).__module__}:{type(task).__qualname__}"
    return next((entry.name for entry in declared("tot.tasks").values() if entry.value == place), place)


def _text(part: Any) -> str | None:
    """Names as they are, pairs as flags spell them, objects by their class, with options where they have some."""
    if part is None or isinstance(part, str):
        return part
    if isinstance(part, Mapping):
        return ",".join(f"{name}={_text(value)}" for name, value in part.items())
    if isinstance(part, list | tuple):
        return ",".join(map(str, part))
    if isinstance(part, Path | int | float):
        return str(part)
    return re.sub(r" at 0x[0-9a-f]+", "", repr(part)) if isinstance(part, BaseModel) else type(part).__name__
