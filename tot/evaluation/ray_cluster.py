"""Join or start a Ray cluster, size the replicas that it can hold, and serialize objects for its workers.

Independent of searches. Ray's own messages never reach standard output.
"""

from __future__ import annotations

import asyncio
import io
import os
import pickle
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, redirect_stdout
from dataclasses import dataclass
from functools import partial
from importlib.metadata import packages_distributions
from typing import Any

import ray
from ray.exceptions import RayError

from tot.decoders.errors import OptionError, reason
from tot.running import LOADING, in_thread

ANSWER = 60.0
"""Timeout in seconds for joining a cluster."""


@asynccontextmanager
async def cluster(address: str | None) -> AsyncIterator[None]:
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
    try:
        if address == "local":  # here, because a cluster ends with the thread that starts it
            init()
            return
        if address != "auto":
            _check_address(address)
        # If another service listens there, Ray retries forever and can't be stopped.
        await asyncio.wait_for(in_thread(init, LOADING), ANSWER)
    except TimeoutError:
        raise OptionError(
            f"no Ray cluster has answered at {address} in {ANSWER:.0f} s: give the host:port that `ray start --head` "
            "prints"
        ) from None
    except (OSError, ValueError, RuntimeError, RayError) as error:
        raise OptionError(
            f"the Ray cluster at {address} can't be joined ({reason(error.__cause__ or error)}): make this machine "
            "one of its nodes, with the same versions of Ray and Python and the same token (RAY_AUTH_MODE=token)"
        ) from None


class _Quiet(io.TextIOBase):
    """Redirect output to standard error, without the messages of Ray's nodes, which are also in Ray's logs."""

    def __init__(self) -> None:
        self._forward = True

    def write(self, text: str) -> int:
        if text != "\n":  # a lone newline belongs to the previous text
            self._forward = "(raylet)" not in text
        return sys.stderr.write(text) if self._forward else len(text)


def _check_address(address: str) -> None:
    """Raise OptionError unless `address` is host:port and accepts connections."""
    host, _, port = address.rpartition(":")
    try:
        if not port.isdecimal():
            raise ValueError("it has no port")
        socket.create_connection((host.strip("[]"), int(port)), timeout=10).close()
    except (OSError, ValueError, OverflowError) as error:
        raise OptionError(
            f"no Ray cluster answers at {address} ({reason(error)}): give the host:port that `ray start --head` "
            "prints, such as 10.0.0.1:6379, or leave the address out"
        ) from None


@dataclass(frozen=True, slots=True)
class Size:
    """A number of replicas, and the resources of each."""

    replicas: int
    cpus: int
    gpus: float

    def __str__(self) -> str:
        noun = "replica" if self.replicas == 1 else "replicas"
        return f"{self.replicas} {noun} of {_amounts({'CPU': self.cpus, 'GPU': self.gpus})}"


def fitting(replicas: int | None, cpus: int, gpus: float) -> Size:
    """Return the size of `replicas` replicas, by default one per node with enough CPUs and GPUs.

    Counts resources in use as available. Raises OptionError with the numbers if the cluster is too small.
    """
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    room = [min(_times(node, "CPU", cpus), _times(node, "GPU", gpus)) for node in nodes]
    size = Size(replicas or max(sum(count > 0 for count in room), 1), cpus, gpus)
    if size.replicas > sum(room):
        resources = ", ".join(_amounts(node) for node in nodes)
        raise OptionError(
            f"the Ray cluster has room for {sum(room)}, not for {size} (nodes: {resources}): lower --replicas, "
            "--cpus-per-replica or --gpus-per-replica, or add nodes"
        )
    return size


def means() -> str:
    """Describe the cluster's total and free resources: "of 2 CPUs and 0 GPUs, 1 CPU and 0 GPUs are free"."""
    return f"of {_amounts(ray.cluster_resources())}, {_amounts(ray.available_resources())} are free"


def _times(node: dict[str, float], resource: str, amount: float) -> int:
    return int(node.get(resource, 0.0) / amount + 1e-9) if amount else sys.maxsize


def _amounts(resources: dict[str, float]) -> str:
    counts = {name: resources.get(name, 0.0) for name in ("CPU", "GPU")}
    return " and ".join(f"{count:g} {name}{'' if count == 1 else 's'}" for name, count in counts.items())


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
