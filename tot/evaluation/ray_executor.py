"""Distribute questions over Ray actors, each with its own engine, and retry the searches of an actor that dies.

Only this process writes samples: workers return them and their trees as JSON text. Workers read secrets such as
OPENAI_API_KEY from their own environment, because Ray would show them to every user of the cluster.
"""

from __future__ import annotations

import asyncio
import json
import os
import pickle
from collections.abc import Awaitable, Callable, Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError, RayTaskError

from tot.decoders.errors import ModelError, OptionError, TotError
from tot.evaluation import fingerprint
from tot.evaluation.attempt import Finish, Pending, attempt, lost_sample, task_group
from tot.evaluation.config import EvaluationRun
from tot.evaluation.questions import Question
from tot.evaluation.ray_cluster import Size, cluster, fitting, means, packed

DEATHS = 3
"""Worker deaths after which a search fails. The last time, it is the only search that runs."""
OPENINGS = 3
"""Attempts to load the model before a worker that dies each time is abandoned."""
SAY, PATIENCE = 30.0, 120.0
"""Seconds without any worker before a warning, and before the run stops."""


async def search_on_ray(
    evaluation: EvaluationRun, record: dict[str, Any], pending: Pending, finish: Finish, note: Callable[[str], None]
) -> None:
    """Search all pending questions on the workers of a Ray cluster; otherwise like `search_here`.

    `record` has the models' hashes; `note` receives warnings for the user. Raises
    OptionError if the cluster can't be joined or has no room.
    """
    options = evaluation.options
    parts = [evaluation.task, *evaluation.config.decoders.values(), *evaluation.parts.values()]
    payload = packed(evaluation, [type(part) for part in parts])
    hashes = {name: value for name, value in record.items() if name.endswith("_sha256") and name != "data_sha256"}
    async with cluster(options.ray_address):
        size = fitting(options.replicas, options.cpus_per_replica or 1, options.gpus_per_replica or 0.0)
        actor = ray.remote(Worker).options(
            num_cpus=size.cpus,
            num_gpus=size.gpus,
            scheduling_strategy="SPREAD",
            runtime_env={"env_vars": {"OMP_NUM_THREADS": str(size.cpus)}},
            max_concurrency=options.concurrency + 1,
        )
        workers = _Workers(lambda: actor.remote(payload, hashes, str(Path.cwd())), size, note)
        try:
            await workers.search(options.concurrency, pending, finish)
        finally:
            for one in workers.started:
                ray.kill(one)


class Worker:
    """Ray actor with an evaluation and its decoders."""

    def __init__(self, packed: bytes, hashes: dict[str, str | None], folder: str) -> None:
        self._packed = packed
        self._hashes = hashes
        self._folder = folder
        self._stack = ExitStack()

    async def place(self) -> str:
        """Return the worker's process and node; any reply shows that the worker is alive."""
        return f"process {os.getpid()} on {ray.util.get_node_ip_address()}"

    async def open(self) -> None:
        """Load the model. Raises TotError if that fails or the weights differ."""
        await asyncio.to_thread(self._open)

    def _open(self) -> None:
        if Path(self._folder).is_dir():  # so that relative paths resolve as in the main process
            os.chdir(self._folder)
        try:
            self._evaluation: EvaluationRun = pickle.loads(self._packed)
        except (ImportError, AttributeError) as error:
            raise OptionError(f"a Ray worker can't load the task ({error}): install it on every node") from None
        config = self._evaluation.config
        for name, found in fingerprint.hash_models(config.weights).items():
            if found != (expected := self._hashes.get(name)):
                model = getattr(config, name.removesuffix("_sha256"), config.model)
                raise ModelError(
                    f"model {model} has the SHA-256 {str(found)[:16]} on a Ray worker, and {str(expected)[:16]} where "
                    "the run was started: put the same files on every node"
                )
        self._decoders = config.open(self._stack)

    async def attempt(self, question: Question, repeat: int) -> tuple[str, str]:
        """Return a sample and its tree as JSON text, null without a tree. Raises the same errors as `attempt`."""
        sample, session = await attempt(self._evaluation, question, repeat, self._decoders)
        tree = None if session is None else session.tree.to_json()
        return json.dumps(sample, default=str), json.dumps(tree)


class _Workers:
    """Starts workers, in place of dead ones too, and assigns searches to their free slots."""

    def __init__(self, start: Callable[[], Any], size: Size, note: Callable[[str], None]) -> None:
        self.started: list[Any] = []
        self._start = start
        self._size = size
        self._note = note
        self._alive: dict[Any, tuple[str, int]] = {}
        """Process and node of each running worker, and its number of concurrent searches."""
        self._slots: asyncio.Queue[Any] = asyncio.Queue()
        """A worker for each search that can start."""
        self._abandoned = 0
        self._lost: list[tuple[Question, int, str]] = []
        """Searches whose worker died, and the last error."""

    async def search(self, concurrency: int, pending: Pending, finish: Finish) -> None:
        """Search all questions. A search whose worker dies is repeated after the others, the last time alone.

        Raises the TotError because of which the run can't continue.
        """
        shares = [max((concurrency + i) // self._size.replicas, 1) for i in range(self._size.replicas)]
        async with task_group() as self._group:
            self._tasks = [self._group.create_task(one) for one in (self._watch(), *map(self._serve, shares))]
            searches: Iterable[tuple[Question, int]] = pending
            for deaths in range(DEATHS):
                async with task_group() as group:
                    for question, repeat in searches:
                        search = group.create_task(self._attempt(await self._free(), question, repeat, finish))
                        if deaths == DEATHS - 1:
                            await search
                searches, lost, self._lost = [(one, repeat) for one, repeat, _ in self._lost], self._lost, []
            for question, repeat, death in lost:
                reason = f"its Ray worker died {DEATHS} times, the last time while it ran only this search: {death}"
                finish(lost_sample(question, repeat, reason), None, None)
            for task in self._tasks:
                task.cancel()

    async def _free(self) -> Any:
        """Wait for a running worker with a free slot."""
        while (worker := await self._slots.get()) not in self._alive:
            pass
        return worker

    async def _attempt(self, worker: Any, question: Question, repeat: int, finish: Finish) -> None:
        try:
            sample, tree = await _reply(worker.attempt.remote(question, repeat))
        except RayError as error:
            death = _first_line(error)
            self._lost.append((question, repeat, death))
            if worker in self._alive:  # the first of its searches that fails
                name, share = self._alive.pop(worker)
                self._note(f"a Ray worker died ({name}), its searches are retried: {death}")
                self._tasks.append(self._group.create_task(self._serve(share)))
        else:
            finish(json.loads(sample), json.loads(tree), None)
            self._slots.put_nowait(worker)

    async def _serve(self, share: int) -> None:
        """Start a worker, and offer `share` slots. Abandon it if it dies each time while it loads the model."""
        for attempt_number in range(1, OPENINGS + 1):
            worker = self._start()
            self.started.append(worker)
            try:
                name = await _reply(worker.place.remote())
                self._alive[worker] = name, share
                await _reply(worker.open.remote())
                break
            except RayError as error:
                self._alive.pop(worker, None)
                if attempt_number == OPENINGS:
                    self._abandon(_first_line(error))
                    return
        for _ in range(share):
            self._slots.put_nowait(worker)

    def _abandon(self, reason: str) -> None:
        self._note(f"a Ray worker is abandoned: {reason}")
        self._abandoned += 1
        if self._abandoned == self._size.replicas:
            raise ModelError(
                f"no Ray worker is left ({reason}): check that the node has enough memory for the model, then "
                "continue with --resume"
            )

    async def _watch(self) -> None:
        """Warn while no worker is available, and raise ModelError after `PATIENCE` seconds."""
        waited = 0.0
        while True:
            await asyncio.sleep(SAY)
            waited = 0.0 if self._alive else waited + SAY
            status = f"{self._size} are required; {means()}" if waited else ""
            if waited == SAY:
                self._note(f"waiting for Ray workers: {status}")
            if waited >= PATIENCE:
                raise ModelError(
                    f"no Ray worker became available in {PATIENCE:.0f} s: {status}. Wait until resources are free, or "
                    "add nodes, then continue with --resume"
                )


async def _reply(call: Awaitable[Any]) -> Any:
    """Return a worker's result. Raises RayError if the worker died, or the error that the worker raised."""
    try:
        return await call
    except RayTaskError as error:
        cause = error.cause
        if isinstance(cause, TotError):
            raise cause from None
        raise ModelError(f"a Ray worker failed: {type(cause).__name__}: {_first_line(cause)}") from error


def _first_line(error: BaseException) -> str:
    """Return an error's first line, of at most 300 characters."""
    return next(filter(None, map(str.strip, str(error).splitlines())), type(error).__name__)[:300]
