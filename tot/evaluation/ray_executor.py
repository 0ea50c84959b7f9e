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


async def search_on_ray(
    evaluation: EvaluationRun, record: dict[str, Any], pending: Pending, finish: Finish, note: Callable[[str], None]
) -> None:
    """As `search_here`, on the workers of a Ray cluster. `record` has the model's hash and the versions of the run;
    `note` is told what the user should know. Raises OptionError where the cluster can't be joined or has no room."""
    options = evaluation.options
    parts = [evaluation.task, *evaluation.config.decoders.values(), *evaluation.parts.values()]
    payload = packed(evaluation, [type(part) for part in parts])
    with ExitStack() as stack:
        # In a thread, so that Ctrl-C is heard; what was begun there is waited for, and then undone.
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
            "runtime_env": {"env_vars": {"OMP_NUM_THREADS": str(size.cpus), "GOMP_SPINCOUNT": "100000"}},
        }
        arguments = (payload, record["model_sha256"], str(Path.cwd()))
        shares = [max((options.concurrency + i) // size.replicas, 1) for i in range(size.replicas)]
        worker = ray.remote(Worker)
        actors = [worker.options(**actor_options, max_concurrency=share + 2).remote(*arguments) for share in shares]
        try:
            deal = _Deal(pending, finish, note, record["versions"], size)
            await deal.among(list(zip(actors, shares, strict=True)))
        finally:
            for actor in actors:
                ray.kill(actor)


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
            self._evaluation: EvaluationRun = pickle.loads(self._packed)
        except (ImportError, AttributeError) as error:
            raise OptionError(f"a Ray worker can't load the task ({error}): install that on every node") from None
        evaluation = self._evaluation
        if (here := fingerprint.hash_model(evaluation.config.weights)) != self._model_sha256:
            raise ModelError(
                f"model {evaluation.config.model} has the SHA-256 {str(here)[:16]} on a Ray worker, and "
                f"{str(self._model_sha256)[:16]} where the run was started: put the same files on every node"
            )
        self._decoders = evaluation.config.open(self._stack)

    async def attempt(self, question: Question, repeat: int) -> tuple[str, str]:
        """A sample and its tree as JSON, null where there is none. Raises what `attempt` raises."""
        await self.open()
        sample, session = await attempt(self._evaluation, question, repeat, self._decoders)
        tree = None if session is None else session.tree.to_json()
        return json.dumps(sample, default=str), json.dumps(tree)


@dataclass(eq=False)
class _Deal:
    """Who searches what. An actor has a share: searches at once."""

    pending: Pending
    finish: Finish
    note: Callable[[str], None]
    versions: dict[str, str]
    size: Size
    again: deque[_Job] = field(default_factory=deque)
    """Whose worker died once."""
    suspects: deque[_Job] = field(default_factory=deque)
    """Whose worker died twice: they wait until one is idle, and have it for themselves."""
    unfinished: int = 0
    """Searches begun and not finished, those to be begun again among them."""
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when a search ends in any way."""
    over: asyncio.Event = field(default_factory=asyncio.Event)
    here: set[str] = field(default_factory=set)
    """Where workers run."""
    given_up: str = ""

    async def among(self, actors: Collection[tuple[Any, int]]) -> None:
        """Until there is nothing left. Raises TotError where the run can't go on."""
        async with running([self.over.wait(), self._serve_all(actors), self._watch()]) as tasks:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for each in done:
                each.result()

    async def _serve_all(self, actors: Collection[tuple[Any, int]]) -> None:
        async with running(self._serve(*each) for each in actors) as serving:
            await asyncio.gather(*serving)
        raise ModelError(
            f"no Ray worker is left ({self.given_up}): see whether its node has the memory for the model, and go on "
            "with --resume"
        )

    async def _watch(self) -> None:
        """Say where no worker can be had, and raise ModelError where that lasts."""
        waited = 0.0
        while True:
            await asyncio.sleep(SAY)
            waited = 0.0 if self.here else waited + SAY
            said = f"{self.size} are wanted; {means()}" if waited else ""
            if waited == SAY:
                self.note(f"waiting for Ray workers: {said}")
            if waited >= PATIENCE:
                raise ModelError(
                    f"no Ray worker could be had in {PATIENCE:.0f} s: {said}. Wait until others are done, or add "
                    "nodes, and go on with --resume"
                )

    async def _serve(self, actor: Any, share: int) -> None:
        """One worker's searches, until it is given up."""
        searches: dict[asyncio.Future[str], _Job] = {}
        try:
            while True:
                name = await self._opened(actor)
                while not (deaths := await self._searched(actor, share, searches)):
                    pass
                self.here.discard(name)
                self.note(f"a Ray worker died ({name}), what it searched is searched again: {deaths}")
        except RayError as error:
            self.given_up = _said(error)
            self.note(f"a Ray worker is given up: {self.given_up}")
        finally:
            for each in searches:
                each.cancel()
            await asyncio.gather(*searches, return_exceptions=True)

    async def _opened(self, actor: Any) -> str:
        """Where a worker runs, once it is there and has its model. Raises RayError where it dies again and again."""
        for turn in range(1, OPENINGS + 1):
            name: str = await _reply(actor.begin.options(max_task_retries=-1).remote())
            self.here.add(name)
            try:
                versions = await _reply(actor.open.remote())
                break
            except RayError:
                self.here.discard(name)
                if turn == OPENINGS:
                    raise
        for library, version in versions.items():
            if version != self.versions.get(library):
                self.note(f"{name} has {library} {version}, and here it is {self.versions.get(library)}")
        return name

    async def _searched(self, actor: Any, share: int, searches: dict[asyncio.Future[str], _Job]) -> str:
        """Fill a worker up to its share, and wait until some searches end; how it died, if it did."""
        while (job := self._next(share, searches.values())) is not None:
            searches[asyncio.ensure_future(_reply(actor.attempt.remote(job.question, job.repeat)))] = job
        if not searches:
            if not self.unfinished:
                self.over.set()
            self.changed.clear()
            await self.changed.wait()
            return ""
        done, _ = await asyncio.wait(searches, return_when=asyncio.FIRST_COMPLETED)
        if any(isinstance(each.exception(), RayError) for each in done):  # all that it searches ends with it
            done, _ = await asyncio.wait(searches)
        died = ""
        for each in done:
            job = searches.pop(each)
            try:
                sample, tree = map(json.loads, each.result())
            except RayError as error:
                died = _said(error)
                job.deaths += 1
                if job.deaths < DEATHS:
                    (self.again if job.deaths == 1 else self.suspects).append(job)
                    continue
                reason = f"its Ray worker died {job.deaths} times, the last time with nothing else to do: {died}"
                sample, tree = lost_sample(job.question, job.repeat, reason), None
            self.unfinished -= 1
            self.finish(sample, tree, None)
        self.changed.set()
        return died

    def _next(self, share: int, searches: Collection[_Job]) -> _Job | None:
        """What a worker with these searches under way begins next; None where it has no room, or there is nothing."""
        if len(searches) >= share or any(job.deaths > 1 for job in searches):
            return None
        if self.again:
            return self.again.popleft()
        if (drawn := next(self.pending, None)) is not None:
            self.unfinished += 1
            return _Job(*drawn)
        return self.suspects.popleft() if self.suspects and not searches else None


async def _reply(asked: Awaitable[Any]) -> Any:
    """What a worker returns. Raises RayError where it died, and the worker's own error where it raised one."""
    try:
        return await asked
    except RayTaskError as error:
        cause = error.cause
        if isinstance(cause, TotError):
            raise cause from None
        raise ModelError(f"a Ray worker can't go on: {type(cause).__name__}: {_said(cause)}") from error


def _said(error: BaseException) -> str:
    """An error's first line."""
    return next(filter(None, map(str.strip, str(error).splitlines())), type(error).__name__)[:300]
