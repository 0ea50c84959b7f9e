"""A Ray cluster: joined or started, room for replicas in it, and what can be sent to its workers.

Knows nothing of searches. Nothing of Ray's own goes to standard output.
"""

from __future__ import annotations

import io
import os
import pickle
import socket
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from importlib.metadata import packages_distributions
from typing import Any

import ray
from ray.exceptions import RayError

from tot.decoders.errors import OptionError, reason

ANSWER = 60.0
"""Seconds in which a cluster has to answer."""


@contextmanager
def cluster(address: str | None) -> Iterator[None]:
    """In the cluster at "host:port"; by default that of RAY_ADDRESS, else one on this machine, which ends with it.

    A program that has joined a cluster itself stays there. Raises OptionError for one that can't be joined.
    """
    if ray.is_initialized():
        if address is not None:
            raise OptionError(f"ray_address={address!r}: this program has joined a Ray cluster already; leave it out")
        yield
        return
    address = address or os.environ.get("RAY_ADDRESS") or None
    if address not in (None, "auto", "local"):
        _check_address(str(address))
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    joined: Future[None] = Future()
    over = threading.Event()
    thread = threading.Thread(target=_stay, args=(address, joined, over), name="tot-ray", daemon=True)
    with redirect_stdout(_Quiet()):  # where Ray would say, in many lines, which workers died
        thread.start()
        _wait(joined, address)
        try:
            yield
        finally:
            over.set()
            thread.join()


class _Quiet(io.TextIOBase):
    """Standard error for what is printed, without what Ray's nodes have to say; Ray's own logs keep that."""

    def __init__(self) -> None:
        self._kept = True

    def write(self, text: str) -> int:
        if text != "\n":  # the end of what was printed before
            self._kept = "(raylet)" not in text
        return sys.stderr.write(text) if self._kept else len(text)


def _stay(address: str | None, joined: Future[None], over: threading.Event) -> None:
    """Join, and leave when all is over: what Ray starts is killed when the thread that started it ends."""
    try:
        ray.init(address or "local", include_dashboard=False, log_to_driver=False, logging_level="error")
    except BaseException as error:  # handed to the thread that waits  # noqa: BLE001
        joined.set_exception(error)
        return
    joined.set_result(None)
    over.wait()
    ray.shutdown()


def _wait(joined: Future[None], address: str | None) -> None:
    """Not for ever: where something other than a cluster listens, Ray asks again and again, and can't be stopped."""
    place = "on this machine" if address is None else f"at {address}"
    try:
        joined.result(None if address is None else ANSWER)
    except TimeoutError:
        raise OptionError(
            f"what is {place} has not answered as a Ray cluster in {ANSWER:.0f} s: give the host:port that `ray start "
            "--head` names"
        ) from None
    except (OSError, ValueError, RuntimeError, RayError) as error:
        raise OptionError(
            f"the Ray cluster {place} can't be joined ({reason(error.__cause__ or error)}): it has to be of the same "
            "Ray, Python and token (RAY_AUTH_MODE=token), and this machine one of its nodes"
        ) from None


def _check_address(address: str) -> None:
    """Whether anything listens there."""
    if address.startswith("ray://"):
        raise OptionError(
            f"{address} is for Ray's client: give host:port, on a machine that `ray start --address=host:port` has "
            "made a node"
        )
    host, colon, port = address.rpartition(":")
    if not (colon and host and port.isdecimal() and int(port) < 2**16):
        raise OptionError(f"{address!r} is not the address of a Ray cluster: give host:port, such as 10.0.0.1:6379")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=10).close()
    except OSError as error:
        raise OptionError(
            f"no Ray cluster answers at {address} ({reason(error)}): start one with `ray start --head`, or "
            "leave the address out"
        ) from None


@dataclass(frozen=True, slots=True)
class Size:
    """So many replicas, and what each takes."""

    replicas: int
    cpus: int
    gpus: float

    def __str__(self) -> str:
        return f"{_counted(self.replicas, 'replica')} of {_counted(self.cpus, 'CPU')} and {_counted(self.gpus, 'GPU')}"


def fitting(replicas: int | None, cpus: int, gpus: float) -> Size:
    """Replicas that the cluster has room for: so many, or one on each node that has room. In use or not.

    Raises OptionError where there are not enough CPUs or GPUs, with the numbers.
    """
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    room = [min(_times(node, "CPU", cpus), _times(node, "GPU", gpus)) for node in nodes]
    size = Size(replicas or max(sum(each > 0 for each in room), 1), cpus, gpus)
    if size.replicas > sum(room):
        here = ", ".join(_amounts(node) for node in nodes)
        raise OptionError(
            f"the Ray cluster has room for {sum(room)}, not for {size} (nodes: {here}): ask for fewer by --replicas, "
            "--cpus-per-replica or --gpus-per-replica, or add nodes"
        )
    return size


def means() -> str:
    """What the cluster has, and what of it no one uses, such as "of 2 CPUs and 0 GPUs, 1 CPU and 0 GPUs are free"."""
    return f"of {_amounts(ray.cluster_resources())}, {_amounts(ray.available_resources())} are free"


def _times(node: dict[str, float], resource: str, wanted: float) -> int:
    return int(node.get(resource, 0.0) / wanted + 1e-9) if wanted else sys.maxsize


def _amounts(resources: dict[str, float]) -> str:
    return " and ".join(_counted(resources.get(resource, 0.0), resource) for resource in ("CPU", "GPU"))


def _counted(count: float, of: str) -> str:
    return f"{count:g} {of}{'' if count == 1 else 's'}"


def packed(what: Any, classes: list[type]) -> bytes:
    """An object for workers to unpickle. The modules that `classes` are from go along, where they aren't installed: a
    task in a file of one's own. Raises OptionError for what holds threads or open files, such as a decoder object."""
    installed = {*packages_distributions(), *sys.stdlib_module_names}
    modules = {base.__module__ for cls in classes for base in cls.__mro__}
    own = [sys.modules[name] for name in modules if name.partition(".")[0] not in installed and name in sys.modules]
    own = [module for module in own if module.__name__ != "__main__"]  # which goes along anyway
    for module in own:
        ray.cloudpickle.register_pickle_by_value(module)
    try:
        packed: bytes = ray.cloudpickle.dumps(what)
    except (TypeError, ValueError, AttributeError, RuntimeError, pickle.PicklingError) as error:
        raise OptionError(
            f"this can't be sent to Ray's workers ({reason(error)}): give decoder and model by name, and parts and "
            "tasks that can be pickled"
        ) from None
    finally:
        for module in own:
            ray.cloudpickle.unregister_pickle_by_value(module)
    return packed
