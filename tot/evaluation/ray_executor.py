"""Distribute questions over Ray actors, each with its own engine, and retry the searches of an actor that dies.

Ray starts and restarts the actors; this module assigns searches to them and limits the retries. Only this process
writes samples: workers return them and their trees as JSON text. Workers read secrets such as OPENAI_API_KEY from their
own environment, because Ray would show them to every user of the cluster.
"""

from __future__ import annotations

import asyncio
import json
import os
import pickle
from collections import deque
from collections.abc import Awaitable, Callable, Collection
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError, RayTaskError

from tot.decoders.errors import ModelError, OptionError, TotError
from tot.evaluation import fingerprint
from tot.evaluation.attempt import Finish, Pending, attempt, lost_sample, running
from tot.evaluation.options import EvaluationRun
from tot.evaluation.questions import Question
from tot.evaluation.ray_cluster import Size, cluster, fitting, means, packed

DEATHS = 3
"""Worker deaths after which a search fails; after the second death, it runs alone on its worker."""
OPENINGS = 3
"""Attempts to load the model before a worker that dies each time is abandoned."""
SAY, PATIENCE = 30.0, 120.0
"""Seconds without any worker before a warning, and before the run stops."""


@dataclass(eq=False, slots=True)
class _Job:
    question: Question
    repeat: int
    deaths: int = 0


async def search_on_ray(
    evaluation: EvaluationRun, record: dict[str, Any], pending: Pending, finish: Finish, note: Callable[[str], None]
) -> None:
    """Search all pending questions on the workers of a Ray cluster; otherwise like `search_here`.

    `record` has the models' hashes and the versions of the run; `note` receives warnings for the user. Raises
    OptionError if the cluster can't be joined or has no room.
    """
    options = evaluation.options
    parts = [evaluation.task, *evaluation.config.decoders.values(), *evaluation.parts.values()]
    payload = packed(evaluation, [type(part) for part in parts])
    with ExitStack() as stack:
        # In a thread, so that Ctrl-C works; on Ctrl-C, wait until the cluster is joined, so that it can be left.
        joining = asyncio.create_task(asyncio.to_thread(stack.enter_context, cluster(options.ray_address)))
        try:
            await asyncio.shield(joining)
        except asyncio.CancelledError:
            await asyncio.gather(joining, return_exceptions=True)
            raise
        size = fitting(options.replicas, options.cpus_per_replica or 1, options.gpus_per_replica or 0.0)
        actor_options = {
            "num_cpus": size.cpus,
            "num_gpus": size.gpus,
            "scheduling_strategy": "SPREAD",
            "max_restarts": -1,
            "max_task_retries": 0,
            "runtime_env": {"env_vars": {"OMP_NUM_THREADS": str(size.cpus)}},
        }
        hashes = {name: value for name, value in record.items() if name.endswith("_sha256") and name != "data_sha256"}
        arguments = (payload, hashes, str(Path.cwd()))
        shares = [max((options.concurrency + i) // size.replicas, 1) for i in range(size.replicas)]
        worker = ray.remote(Worker)
        actors = [worker.options(**actor_options, max_concurrency=share + 2).remote(*arguments) for share in shares]
        try:
            scheduler = _Scheduler(pending, finish, note, record["versions"], size)
            await scheduler.run(list(zip(actors, shares, strict=True)))
        finally:
            for actor in actors:
                ray.kill(actor)


class Worker:
    """Ray actor that unpickles the evaluation and opens its decoders on first use, also after a restart."""

    def __init__(self, packed: bytes, hashes: dict[str, str | None], folder: str) -> None:
        self._packed = packed
        self._hashes = hashes
        self._folder = folder
        self._opening: asyncio.Task[None] | None = None
        self._stack = ExitStack()

    async def begin(self) -> str:
        """Return the worker's process and node; any reply shows that the worker is alive."""
        return f"process {os.getpid()} on {ray.util.get_node_ip_address()}"

    async def open(self) -> dict[str, str]:
        """Load the model, and return the worker's versions. Raises TotError if that fails or the weights differ."""
        if self._opening is None:
            self._opening = asyncio.create_task(asyncio.to_thread(self._open))
        await asyncio.shield(self._opening)
        return fingerprint.versions()

    def _open(self) -> None:
        if Path(self._folder).is_dir():  # so that relative paths resolve as in the main process
            os.chdir(self._folder)
        try:
            self._evaluation: EvaluationRun = pickle.loads(self._packed)
        except (ImportError, AttributeError) as error:
            raise OptionError(f"a Ray worker can't load the task ({error}): install it on every node") from None
        evaluation = self._evaluation
        for name, found in fingerprint.hash_models(evaluation.config.weights).items():
            if found != (expected := self._hashes.get(name)):
                model = getattr(evaluation.config, name.removesuffix("_sha256"), evaluation.config.model)
                raise ModelError(
                    f"model {model} has the SHA-256 {str(found)[:16]} on a Ray worker, and {str(expected)[:16]} where "
                    "the run was started: put the same files on every node"
                )
        self._decoders = evaluation.config.open(self._stack)

    async def attempt(self, question: Question, repeat: int) -> tuple[str, str]:
        """Return a sample and its tree as JSON text, null without a tree. Raises the same errors as `attempt`."""
        await self.open()
        sample, session = await attempt(self._evaluation, question, repeat, self._decoders)
        tree = None if session is None else session.tree.to_json()
        return json.dumps(sample, default=str), json.dumps(tree)


@dataclass(eq=False)
class _Scheduler:
    """Assigns searches to actors. An actor's share is its number of concurrent searches."""

    pending: Pending
    finish: Finish
    note: Callable[[str], None]
    versions: dict[str, str]
    size: Size
    retries: deque[_Job] = field(default_factory=deque)
    """Jobs whose worker died once."""
    suspects: deque[_Job] = field(default_factory=deque)
    """Jobs whose worker died twice: each waits for an idle worker and runs alone on it."""
    unfinished: int = 0
    """Number of searches started and not finished, including retries."""
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when a search ends, successfully or not."""
    finished: asyncio.Event = field(default_factory=asyncio.Event)
    alive: set[str] = field(default_factory=set)
    """Process and node of each running worker."""
    last_error: str = ""

    async def run(self, actors: Collection[tuple[Any, int]]) -> None:
        """Serve (actor, share) pairs until all searches are finished. Raises TotError if the run can't continue."""
        async with running([self.finished.wait(), self._serve_all(actors), self._watch()]) as tasks:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()

    async def _serve_all(self, actors: Collection[tuple[Any, int]]) -> None:
        async with running(self._serve(*each) for each in actors) as serving:
            await asyncio.gather(*serving)
        raise ModelError(
            f"no Ray worker is left ({self.last_error}): check that the node has enough memory for the model, then "
            "continue with --resume"
        )

    async def _watch(self) -> None:
        """Warn while no worker is available, and raise ModelError after `PATIENCE` seconds."""
        waited = 0.0
        while True:
            await asyncio.sleep(SAY)
            waited = 0.0 if self.alive else waited + SAY
            status = f"{self.size} are required; {means()}" if waited else ""
            if waited == SAY:
                self.note(f"waiting for Ray workers: {status}")
            if waited >= PATIENCE:
                raise ModelError(
                    f"no Ray worker became available in {PATIENCE:.0f} s: {status}. Wait until resources are free, or "
                    "add nodes, then continue with --resume"
                )

    async def _serve(self, actor: Any, share: int) -> None:
        """Run searches on one worker until it is abandoned."""
        searches: dict[asyncio.Future[str], _Job] = {}
        try:
            while True:
                name = await self._open(actor)
                while not (death := await self._search(actor, share, searches)):
                    pass
                self.alive.discard(name)
                self.note(f"a Ray worker died ({name}), its searches are retried: {death}")
        except RayError as error:
            self.last_error = _first_line(error)
            self.note(f"a Ray worker is abandoned: {self.last_error}")
        finally:
            for search in searches:
                search.cancel()
            await asyncio.gather(*searches, return_exceptions=True)

    async def _open(self, actor: Any) -> str:
        """Wait until a worker has loaded its model. Return its process and node. Raises RayError if it keeps dying."""
        for attempt_number in range(1, OPENINGS + 1):
            name: str = await _reply(actor.begin.options(max_task_retries=-1).remote())
            self.alive.add(name)
            try:
                versions = await _reply(actor.open.remote())
                break
            except RayError:
                self.alive.discard(name)
                if attempt_number == OPENINGS:
                    raise
        for library, version in versions.items():
            if version != self.versions.get(library):
                self.note(f"{name} has {library} {version}, but the main process has {self.versions.get(library)}")
        return name

    async def _search(self, actor: Any, share: int, searches: dict[asyncio.Future[str], _Job]) -> str:
        """Fill a worker up to its share, and wait until a search ends. Return the error if the worker died."""
        while (job := self._next(share, searches.values())) is not None:
            searches[asyncio.ensure_future(_reply(actor.attempt.remote(job.question, job.repeat)))] = job
        if not searches:
            if not self.unfinished:
                self.finished.set()
            self.changed.clear()
            await self.changed.wait()
            return ""
        done, _ = await asyncio.wait(searches, return_when=asyncio.FIRST_COMPLETED)
        if any(isinstance(search.exception(), RayError) for search in done):  # all of its searches fail with it
            done, _ = await asyncio.wait(searches)
        death = ""
        for search in done:
            job = searches.pop(search)
            try:
                sample, tree = map(json.loads, search.result())
            except RayError as error:
                death = _first_line(error)
                job.deaths += 1
                if job.deaths < DEATHS:
                    (self.retries if job.deaths == 1 else self.suspects).append(job)
                    continue
                reason = f"its Ray worker died {job.deaths} times, the last time while it ran only this search: {death}"
                sample, tree = lost_sample(job.question, job.repeat, reason), None
            self.unfinished -= 1
            self.finish(sample, tree, None)
        self.changed.set()
        return death

    def _next(self, share: int, searches: Collection[_Job]) -> _Job | None:
        """Return the next job for a worker with these running searches; None if it is full or no job is available."""
        if len(searches) >= share or any(job.deaths > 1 for job in searches):
            return None
        if self.retries:
            return self.retries.popleft()
        if (item := next(self.pending, None)) is not None:
            self.unfinished += 1
            return _Job(*item)
        return self.suspects.popleft() if self.suspects and not searches else None


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
