"""solve() and asolve(): solve one question of a task with a model and a search."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, Unpack

from tot.config import SearchConfig
from tot.run import Run, Watcher
from tot.running import run_to_end
from tot.search.certainty import curves_for
from tot.search.checkpoint import Checkpoint
from tot.solution import Solution
from tot.task.checked import CheckedTask
from tot.task.task import Task

if TYPE_CHECKING:
    from tot.search.options import SearchOptions


def solve(
    task: Task | type[Task] | str,
    question: str,
    config: SearchConfig | None = None,
    *,
    hooks: object | None = None,
    checkpoint: Checkpoint | None = None,
    watch: Watcher | None = None,
    **options: Unpack[SearchOptions],
) -> Solution:
    """Solve one question. Works in a script and inside a running event loop (Jupyter).

    Ctrl-C ends the search with the best answer so far.

    Args:
        task: A task, its class, its name, or "path/to/file.py:ClassName".
        question: The question, as text.
        config: The options of the run.
        hooks: Functions that watch and steer the search (see `tot.search.hooks`).
        checkpoint: Records every step, and resumes a killed run.
        watch: Called with the run at the start and after every step.
        options: Fields of `SearchConfig`, which override `config` (model, decoder, search, budget, max_tokens, seed…).
            Other names are options of the decoder.

    Raises:
        TotError: An error that the caller can fix.
    """
    arguments: dict[str, Any] = {"hooks": hooks, "checkpoint": checkpoint, "watch": watch}
    return run_to_end(asolve(task, question, config, **arguments, keep_best=True, **options))


async def asolve(
    task: Task | type[Task] | str,
    question: str,
    config: SearchConfig | None = None,
    *,
    hooks: object | None = None,
    checkpoint: Checkpoint | None = None,
    watch: Watcher | None = None,
    keep_best: bool = False,
    **options: Unpack[SearchOptions],
) -> Solution:
    """Solve one question, as a coroutine. Concurrent calls with one decoder object share its forward passes.

    Cancelling it raises CancelledError; with `keep_best`, it returns the best answer so far instead.
    """
    config = SearchConfig.of(config, options).exact()
    task = config.suited(task)
    parts, filters = config.parts(task), config.filters_for(task)
    CheckedTask(task).start(question)  # reject an invalid question before a model is loaded
    if config.certainty is not None:
        curves_for(task, config.certainty)
    with ExitStack() as stack:
        decoders = await config.aopen(stack)
        about: dict[str, Any] = {"hooks": hooks, "checkpoint": checkpoint, "watch": watch}
        return await Run(task, question, config, decoders, parts, filters, **about).solve(keep_best)
