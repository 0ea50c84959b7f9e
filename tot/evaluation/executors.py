"""Where an evaluation's searches run: in this process, on one engine. (`ray_executor` spreads them over a cluster.)

An executor knows neither folders nor progress: it is given what is to be searched, and tells of each sample.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from importlib.util import find_spec
from typing import Any, Protocol

from tot.decoders.errors import OptionError
from tot.evaluation.attempt import attempt
from tot.evaluation.questions import Question
from tot.evaluation.work import Work
from tot.search.session import Problem, Watcher

Pending = Iterator[tuple[Question, int]]
"""Questions, each with the number of its repeat."""
Finish = Callable[[dict[str, Any], dict[str, Any] | None, Problem | None], None]
"""Told of a sample, of its tree as JSON data, and of the search, where it ran in this process."""


class Executor(Protocol):
    """Searches questions, as many at once as the configuration says."""

    async def run(self, pending: Pending, finish: Finish) -> None:
        """Search all of them, and tell of each as it is finished, in any order; cancelled, stop what runs.

        Raises TotError for what no other question could do without.
        """


class Local:
    """All on one engine, sharing its forward passes. `watch` is told of each search as it begins."""

    def __init__(self, work: Work, watch: Watcher) -> None:
        self._work = work
        self._watch = watch

    async def run(self, pending: Pending, finish: Finish) -> None:
        with ExitStack() as stack:
            work = self._work
            decoders = await asyncio.to_thread(work.config.open, stack)

            async def draw() -> None:
                for question, repeat in pending:
                    sample, problem = await attempt(work, question, repeat, decoders, self._watch)
                    finish(sample, None if problem is None else problem.tree.to_json(), problem)

            workers = [asyncio.create_task(draw()) for _ in range(work.configuration.concurrency)]
            try:
                await asyncio.gather(*workers)
            finally:
                for worker in workers:
                    worker.cancel()
                await asyncio.gather(*workers, return_exceptions=True)


def executor_of(work: Work, record: dict[str, Any], watch: Watcher, note: Callable[[str], None]) -> Executor:
    """The executor that the configuration names. `record` says what the folder is of: the model's hash, versions.
    `note` is told what the user should know. Raises OptionError where Ray is wanted and not installed."""
    if work.configuration.executor == "local":
        return Local(work, watch)
    require_ray()
    from tot.evaluation.ray_executor import RayExecutor

    return RayExecutor(work, record, note)


def require_ray() -> None:
    """Raises OptionError where Ray is not installed."""
    if find_spec("ray") is None:
        raise OptionError("--executor ray needs Ray, which is not installed: pip install 'tot[ray]'")
