"""Questions dealt out to Ray actors, each with an engine of its own, and dealt again where one dies.

Ray starts actors, and starts them again on nodes with room; here it is decided who searches what, and how often. The
process that runs this alone writes samples down: they and their trees leave a worker as JSON text. OPENAI_API_KEY and
the like are read where a worker runs: they are not sent, as Ray would show them to whoever looks at the cluster.
"""

from __future__ import annotations

import asyncio
import json
import os
import pickle
from collections import deque
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError, RayTaskError

from tot.decoders.errors import ModelError, OptionError, TotError
from tot.evaluation import fingerprint
from tot.evaluation.attempt import Finish, Pending, Work, attempt, lost_sample
from tot.evaluation.questions import Question
from tot.evaluation.ray_cluster import Size, cluster, fitting, means, packed

DEATHS = 3
"""A search whose worker died so often is given up; it is alone on its worker from the second death on."""
OPENINGS = 3
"""A worker that died so often while it loaded the model is given up."""
SAY, PATIENCE = 30.0, 120.0
"""Seconds without any worker until that is said, and until the run is stopped."""


@dataclass(eq=False, slots=True)
class _Job:
    question: Question
    repeat: int
    deaths: int = 0


@dataclass(eq=False, slots=True)
class _Replica:
    actor: Any
    share: int
    """Searches at once."""
    name: str | None = None
    """Where it runs; None where it doesn't."""
    up: bool = False
    running: set[_Job] = field(default_factory=set)

    def has_room(self, alone: bool) -> bool:
        suspected = any(job.deaths > 1 for job in self.running)
        return self.up and not suspected and len(self.running) < (1 if alone else self.share)


async def search_on_ray(
    work: Work, record: dict[str, Any], pending: Pending, finish: Finish, note: Callable[[str], None]
) -> None:
    """As `search_here`, on the workers of a Ray cluster. `record` has the model's hash and the versions of the run;
    `note` is told what the user should know. Raises OptionError where the cluster can't be joined or has no room."""
    configuration = work.configuration
    parts = [work.task, *work.config.decoders.values(), *work.config.parts(work.task).values()]
    payload = packed(work, [type(part) for part in parts])
    with ExitStack() as stack:
        # In a thread, so that Ctrl-C is heard; what was begun there is waited for, and then undone.
        joining = asyncio.create_task(asyncio.to_thread(stack.enter_context, cluster(configuration.ray_address)))
        try:
            await asyncio.shield(joining)
        except asyncio.CancelledError:
            await asyncio.gather(joining, return_exceptions=True)
            raise
        size = fitting(
            configuration.replicas, configuration.cpus_per_replica or 1, configuration.gpus_per_replica or 0.0
        )
        arguments = (payload, record["model_sha256"], str(Path.cwd()))
        replicas = [
            _Replica(_actor(size, share).remote(*arguments), share)
            for share in _shares(configuration.concurrency, size)
        ]
        try:
            await _Deal(replicas, pending, finish, note, record["versions"], size).all()
        finally:
            for replica in replicas:
                ray.kill(replica.actor)


class Worker:
    """Unpickles its work and opens decoders once, when it is first asked to; again wherever it is started again."""

    def __init__(self, packed: bytes, model_sha256: str | None, folder: str) -> None:
        self._packed = packed
        self._model_sha256 = model_sha256
        self._folder = folder
        self._opening: asyncio.Task[None] | None = None
        self._stack = ExitStack()

    async def begin(self) -> str:
        """Where it runs; an answer means that it does."""
        return f"process {os.getpid()} on {ray.util.get_node_ip_address()}"

    async def open(self) -> dict[str, str]:
        """Have the engine ready; the versions here. Raises TotError where it can't be, or where the model's name means
        other weights here."""
        if self._opening is None:
            self._opening = asyncio.create_task(asyncio.to_thread(self._open))
        await asyncio.shield(self._opening)
        return fingerprint.versions()

    def _open(self) -> None:
        if Path(self._folder).is_dir():  # relative paths mean the same here
            os.chdir(self._folder)
        try:
            self._work: Work = pickle.loads(self._packed)
        except (ImportError, AttributeError) as error:
            raise OptionError(f"a Ray worker can't load the task ({error}): install that on every node") from None
        work = self._work
        if (here := fingerprint.hash_model(work.config.weights)) != self._model_sha256:
            raise ModelError(
                f"model {work.configuration.model} has the SHA-256 {str(here)[:16]} on a Ray worker, and "
                f"{str(self._model_sha256)[:16]} where the run was started: put the same files on every node"
            )
        self._decoders = work.config.open(self._stack)

    async def attempt(self, question: Question, repeat: int) -> tuple[str, str]:
        """A sample and its tree as JSON, null where there is none. Raises what `attempt` raises."""
        await self.open()
        sample, session = await attempt(self._work, question, repeat, self._decoders)
        tree = None if session is None else session.tree.to_json()
        return json.dumps(sample, default=str), json.dumps(tree)


def _shares(concurrency: int, size: Size) -> list[int]:
    """Searches at once on each replica; each has at least one."""
    least, more = divmod(concurrency, size.replicas)
    return [max(least + (number < more), 1) for number in range(size.replicas)]


def _actor(size: Size, share: int) -> Any:
    """The actor's class, with what one replica takes."""
    return ray.remote(Worker).options(
        num_cpus=size.cpus,
        num_gpus=size.gpus,
        scheduling_strategy="SPREAD",
        max_restarts=-1,
        max_task_retries=0,
        max_concurrency=share + 2,
        runtime_env={"env_vars": {"OMP_NUM_THREADS": str(size.cpus), "GOMP_SPINCOUNT": "100000"}},
    )


class _Deal:
    """Who searches what."""

    def __init__(
        self,
        replicas: list[_Replica],
        pending: Pending,
        finish: Finish,
        note: Callable[[str], None],
        versions: dict[str, str],
        size: Size,
    ) -> None:
        self._replicas = replicas
        self._pending = pending
        self._finish = finish
        self._note = note
        self._versions = versions
        self._size = size
        self._again: deque[_Job] = deque()
        """Whose worker died once."""
        self._suspects: deque[_Job] = deque()
        """Whose worker died twice: they wait until one is idle, and have it for themselves."""
        self._searching: dict[asyncio.Future[Any], tuple[_Replica, _Job]] = {}
        self._starting: dict[asyncio.Future[Any], _Replica] = {}
        self._given_up = ""

    async def all(self) -> None:
        """Until there is nothing left. Raises TotError where the run can't go on."""
        try:
            for replica in self._replicas:
                self._start(replica)
            while self._deal():
                await self._wait()
                for future in [each for each in self._searching if each.done()]:
                    self._searched(future)
                for future in [each for each in self._starting if each.done()]:
                    self._started(future)
        finally:
            futures = [*self._searching, *self._starting]
            for future in futures:
                future.cancel()
            await asyncio.gather(*futures, return_exceptions=True)

    def _deal(self) -> bool:
        """Give workers with room something to do; False where nothing is left, under way or waiting."""
        for replica in self._replicas:
            while replica.has_room(alone=False) and (job := self._next()) is not None:
                self._search(replica, job)
            if replica.has_room(alone=True) and self._suspects:
                self._search(replica, self._suspects.popleft())
        if self._searching or self._again or self._suspects:
            return True
        if any(replica.up for replica in self._replicas):  # idle ones: `_next` had nothing
            return False
        if (first := next(self._pending, None)) is not None:
            self._again.append(_Job(*first))
        return first is not None

    def _next(self) -> _Job | None:
        if self._again:
            return self._again.popleft()
        drawn = next(self._pending, None)
        return None if drawn is None else _Job(*drawn)

    async def _wait(self) -> None:
        """Until something happens. Raises ModelError where no worker can be had."""
        waited = 0.0
        while True:
            if not (self._searching or self._starting):
                raise ModelError(
                    f"no Ray worker is left ({self._given_up}): see whether its node has the memory for the model, and "
                    "go on with --resume"
                )
            done, _ = await asyncio.wait(
                [*self._searching, *self._starting], timeout=SAY, return_when=asyncio.FIRST_COMPLETED
            )
            if done:
                return
            if any(replica.name is not None for replica in self._replicas):
                continue
            said = f"{self._size} are wanted; {means()}"
            if waited == 0:
                self._note(f"waiting for Ray workers: {said}")
            waited += SAY
            if waited >= PATIENCE:
                raise ModelError(
                    f"no Ray worker could be had in {PATIENCE:.0f} s: {said}. Wait until others are done, or add "
                    "nodes, and go on with --resume"
                )

    def _search(self, replica: _Replica, job: _Job) -> None:
        replica.running.add(job)
        self._searching[asyncio.ensure_future(replica.actor.attempt.remote(job.question, job.repeat))] = replica, job

    def _searched(self, future: asyncio.Future[Any]) -> None:
        replica, job = self._searching.pop(future)
        mine = job in replica.running
        replica.running.discard(job)
        try:
            sample, tree = map(json.loads, _result(future))
        except RayError as error:
            job.deaths += 1
            if replica.up and mine:
                self._note(f"a Ray worker died ({replica.name}), what it searched is searched again: {_said(error)}")
                replica.up, replica.name = False, None
                replica.running.clear()
                self._start(replica)
            if job.deaths < DEATHS:
                (self._again if job.deaths == 1 else self._suspects).append(job)
                return
            reason = f"its Ray worker died {job.deaths} times, the last time with nothing else to do: {_said(error)}"
            sample, tree = lost_sample(job.question, job.repeat, reason), None
        self._finish(sample, tree, None)

    def _start(self, replica: _Replica) -> None:
        self._starting[asyncio.create_task(self._opened(replica))] = replica

    async def _opened(self, replica: _Replica) -> None:
        """Wait for a worker to be there, and to have its model. Raises RayError where it dies again and again."""
        for turn in range(OPENINGS):
            replica.name = await replica.actor.begin.options(max_task_retries=-1).remote()
            try:
                versions = await replica.actor.open.remote()
                break
            except RayTaskError:
                raise
            except RayError:
                replica.name = None
                if turn == OPENINGS - 1:
                    raise
        for name, version in versions.items():
            if version != self._versions.get(name):
                self._note(f"{replica.name} has {name} {version}, and here it is {self._versions.get(name)}")

    def _started(self, future: asyncio.Future[Any]) -> None:
        replica = self._starting.pop(future)
        try:
            _result(future)
            replica.up = True
        except RayError as error:
            self._given_up = _said(error)
            self._note(f"a Ray worker is given up: {self._given_up}")


def _result(future: asyncio.Future[Any]) -> Any:
    """What a future holds. Raises RayError where the worker died, and the worker's own error where it raised one."""
    try:
        return future.result()
    except RayTaskError as error:
        cause = error.cause
        if isinstance(cause, TotError):
            raise cause from None
        raise ModelError(f"a Ray worker can't go on: {type(cause).__name__}: {_said(cause)}") from error


def _said(error: BaseException) -> str:
    """An error's first line."""
    return next(filter(None, map(str.strip, str(error).splitlines())), type(error).__name__)[:300]
