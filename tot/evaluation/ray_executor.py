"""Distribute questions over the workers of a Ray cluster, each with its own engine.

Only this process writes samples: workers return them and their trees as JSON text. Workers read secrets such as
OPENAI_API_KEY from their own environment, because Ray would show them to every user of the cluster. Ray's own messages
never reach standard output.
"""

from __future__ import annotations

import asyncio
import io
import json
import os
import pickle
import socket
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import ExitStack, asynccontextmanager, redirect_stdout
from functools import partial
from importlib.metadata import packages_distributions
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError, RayTaskError

from tot.decoders.errors import ModelError, OptionError, TotError, reason
from tot.evaluation import fingerprint
from tot.evaluation.attempt import Finish, Pending, attempt, lost_sample, task_group
from tot.evaluation.config import EvaluationRun
from tot.evaluation.questions import Question
from tot.llm.decoders import open_decoders
from tot.running import LOADING, in_thread

ANSWER = 60.0
"""Timeout in seconds for joining a cluster."""
DEATHS = 3
"""Worker deaths after which a search fails. The last time, it is the only search that runs."""
SAY, PATIENCE = 30.0, 120.0
"""Seconds without any worker before a warning, and before the run stops."""


async def search_on_ray(
    evaluation: EvaluationRun, record: dict[str, Any], pending: Pending, finish: Finish, note: Callable[[str], None]
) -> None:
    """Search all pending questions on the workers of a Ray cluster; otherwise like `search_here`.

    `record` has the models' hashes; `note` receives warnings for the user. Raises OptionError if the cluster can't be
    joined or has no room.
    """
    options = evaluation.options
    parts = [evaluation.task, *evaluation.config.model.decoders.values(), *evaluation.parts.values()]
    payload = packed(evaluation, [type(part) for part in parts])
    hashes = {name: value for name, value in record.items() if name.endswith("_sha256") and name != "data_sha256"}
    async with _cluster(options.ray_address):
        replicas, cores = _shares(options.replicas)
        actor = ray.remote(Worker).options(
            num_cpus=cores,
            scheduling_strategy="SPREAD",
            runtime_env={"env_vars": {"OMP_NUM_THREADS": str(cores)}},
            max_concurrency=options.concurrency + 1,
        )
        needs = f"{replicas} of {_cores(cores)}"
        workers = _Workers(lambda: actor.remote(payload, hashes, str(Path.cwd())), replicas, needs, note)
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
        for name, found in fingerprint.hash_models(weights := config.model.weights).items():
            if found != (expected := self._hashes.get(name)):
                own: Any = name.removesuffix("_sha256")
                model = weights.get(own, next(iter(weights.values()), None))
                raise ModelError(
                    f"model {model} has the SHA-256 {str(found)[:16]} on a Ray worker, and {str(expected)[:16]} where "
                    "the run was started: put the same files on every node"
                )
        self._decoders = open_decoders(config.model, self._stack)

    async def attempt(self, question: Question, repeat: int) -> tuple[str, str]:
        """Return a sample and its tree as JSON text, null without a tree. Raises the same errors as `attempt`."""
        sample, run = await attempt(self._evaluation, question, repeat, self._decoders)
        return json.dumps(sample, default=str), json.dumps(None if run is None else run.tree.to_json())


class _Workers:
    """Starts workers, in place of dead ones too, and assigns searches to their free slots."""

    def __init__(self, start: Callable[[], Any], replicas: int, needs: str, note: Callable[[str], None]) -> None:
        self.started: list[Any] = []
        self._start = start
        self._left = replicas
        """Replicas that are not abandoned."""
        self._needs = needs
        self._note = note
        self._alive: dict[Any, tuple[str, int]] = {}
        """Process and node of each running worker, and its number of concurrent searches."""
        self._slots: asyncio.Queue[Any] = asyncio.Queue()
        """A worker for each search that can start."""
        self._lost: list[tuple[Question, int, str]] = []
        """Searches whose worker died, and the last error."""

    async def search(self, concurrency: int, pending: Pending, finish: Finish) -> None:
        """Search all questions. A search whose worker dies is repeated after the others, the last time alone.

        Raises the TotError because of which the run can't continue.
        """
        shares = [max((concurrency + i) // self._left, 1) for i in range(self._left)]
        async with task_group() as self._group:
            self._tasks = [self._group.create_task(self._serve(share)) for share in shares]
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
        """Wait for a running worker with a free slot. Raises ModelError after `PATIENCE` seconds without any worker."""
        waited = 0.0
        while True:
            try:
                worker = await asyncio.wait_for(self._slots.get(), SAY)
            except TimeoutError:
                waited = 0.0 if self._alive else waited + SAY
                every, free = (int(of().get("CPU", 0)) for of in (ray.cluster_resources, ray.available_resources))
                status = f"{self._needs} are required; of {_cores(every)}, {free} are free"
                if waited == SAY:
                    self._note(f"waiting for Ray workers: {status}")
                if waited >= PATIENCE:
                    raise ModelError(
                        f"no Ray worker became available in {PATIENCE:.0f} s: {status}. Wait until resources are free, "
                        "or add nodes, then continue with --resume"
                    ) from None
            else:
                if worker in self._alive:
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
        """Start a worker, and offer `share` slots. Abandon it if it dies while it loads the model."""
        worker = self._start()
        self.started.append(worker)
        try:
            name = await _reply(worker.place.remote())
            self._alive[worker] = name, share
            await _reply(worker.open.remote())
        except RayError as error:
            self._alive.pop(worker, None)
            self._note(f"a Ray worker is abandoned: {_first_line(error)}")
            self._left -= 1
            if self._left == 0:
                raise ModelError(
                    f"no Ray worker is left ({_first_line(error)}): check that the node has enough memory for the "
                    "model, then continue with --resume"
                ) from None
            return
        for _ in range(share):
            self._slots.put_nowait(worker)


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


def _shares(replicas: int | None) -> tuple[int, int]:
    """Return the number of replicas, by default one per node, and the cores of each, the most that fit.

    Counts cores in use as available. Raises OptionError if the cluster is too small.
    """
    nodes = [int(node["Resources"].get("CPU", 0)) for node in ray.nodes() if node["Alive"]]
    count = replicas or max(sum(cores > 0 for cores in nodes), 1)
    fitting = [cores for cores in range(1, max(nodes) + 1) if sum(node // cores for node in nodes) >= count]
    if not fitting:
        raise OptionError(
            f"the Ray cluster has room for {sum(nodes)} replicas, not for {count} (nodes of "
            f"{' and '.join(map(_cores, nodes))}): lower --replicas, or add nodes"
        )
    return count, fitting[-1]


def _cores(count: int) -> str:
    return f"{count} core{'' if count == 1 else 's'}"


@asynccontextmanager
async def _cluster(address: str | None) -> AsyncIterator[None]:
    """Join the cluster at "host:port"; by default RAY_ADDRESS, otherwise a local cluster that the exit shuts down.

    If the program has already joined a cluster, use that one. Raises OptionError if the cluster can't be joined.
    """
    if ray.is_initialized():
        if address is not None:
            raise OptionError(f"ray_address={address!r}: this program has already joined a Ray cluster; leave it out")
        yield
        return
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    with redirect_stdout(_Quiet()):  # Ray prints many lines about dead workers
        await _join(address or os.environ.get("RAY_ADDRESS") or "local")
        try:
            yield
        finally:
            ray.shutdown()


async def _join(address: str) -> None:
    init = partial(ray.init, address, include_dashboard=False, log_to_driver=False, logging_level="error")
    remedy = "give the host:port that `ray start --head` prints"
    try:
        if address == "local":  # here, because a cluster ends with the thread that starts it
            init()
            return
        if address != "auto":
            host, _, port = address.rpartition(":")
            socket.create_connection((host.strip("[]"), int(port)), timeout=10).close()
        # If another service listens there, Ray retries forever and can't be stopped.
        await asyncio.wait_for(in_thread(init, LOADING), ANSWER)
    except TimeoutError:
        raise OptionError(f"no Ray cluster has answered at {address} in {ANSWER:.0f} s: {remedy}") from None
    except (OSError, ValueError, OverflowError, RuntimeError, RayError) as error:
        raise OptionError(
            f"the Ray cluster at {address} can't be joined ({reason(error.__cause__ or error)}): {remedy}, on one of "
            "its nodes, with the same versions of Ray and Python and the same token (RAY_AUTH_MODE=token)"
        ) from None


class _Quiet(io.TextIOBase):
    """Redirect output to standard error, without the messages of Ray's nodes, which are also in Ray's logs."""

    def __init__(self) -> None:
        self._forward = True

    def write(self, text: str) -> int:
        if text != "\n":  # a lone newline belongs to the previous text
            self._forward = "(raylet)" not in text
        return sys.stderr.write(text) if self._forward else len(text)


def packed(what: Any, classes: list[type]) -> bytes:
    """Pickle an object for workers, together with the modules of `classes` that aren't installed, such as a task file.

    Raises OptionError for objects that hold threads or open files, such as a decoder.
    """
    installed = {*packages_distributions(), *sys.stdlib_module_names, "__main__"}  # __main__ is pickled by value anyway
    names = {base.__module__ for cls in classes for base in cls.__mro__}
    own = [sys.modules[name] for name in names if name.partition(".")[0] not in installed and name in sys.modules]
    for module in own:
        ray.cloudpickle.register_pickle_by_value(module)
    try:
        packed: bytes = ray.cloudpickle.dumps(what)
    except (TypeError, ValueError, AttributeError, RuntimeError, pickle.PicklingError) as error:
        raise OptionError(
            f"the evaluation can't be sent to Ray's workers ({reason(error)}): give decoder and model by name, and "
            "parts and tasks that can be pickled"
        ) from None
    finally:
        for module in own:
            ray.cloudpickle.unregister_pickle_by_value(module)
    return packed
