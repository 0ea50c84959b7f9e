"""What was measured of a model, kept in the cache folder from one process to the next.

A JSON file of a format version, what it is about, and what was found; written whole or not at all. One that is of
another format, about something else or damaged is as good as none. What a forward takes depends on the processor and
its threads, the model, its weights and dtype, the engine's sources and torch; what is accepted on the model only.
"""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock

from tot.decoders.engine.runner import Runner
from tot.decoders.files import replacing
from tot.decoders.kernels.native import processor
from tot.decoders.kernels.packing import some_numbers
from tot.decoders.models.gguf_cache import cache_folder

log = logging.getLogger(__name__)

FORMAT = 1
_PATIENCE = 60.0
"""Seconds to wait for another process that measures the same."""


class Kept:
    """One such file: `kind` is the folder it is in, `about` all that what it holds depends on."""

    def __init__(self, kind: str, about: Mapping[str, Any]) -> None:
        self._about = json.loads(json.dumps(about))
        digest = hashlib.sha256(json.dumps(self._about, sort_keys=True).encode()).hexdigest()[:16]
        name = re.sub(r"[^\w.-]+", "-", Path(str(about["model"])).name).strip("-.")[-60:]
        self.path = cache_folder() / kind / f"{name}-{digest}.json"

    def read(self) -> list[Any]:
        """What was found, or nothing."""
        try:
            kept = json.loads(self.path.read_text())
            if kept["format"] == FORMAT and kept["about"] == self._about:
                return list(kept["found"])
            log.info("%s is of another format: it is made anew", self.path)
        except FileNotFoundError:
            pass
        except (OSError, ValueError, KeyError, TypeError) as error:
            log.info("%s can't be read (%s): it is made anew", self.path, error)
        return []

    def write(self, found: list[Any]) -> None:
        """Keep it. Where the folder can't be written, nothing is kept."""
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with replacing(self.path) as made:
                made.write_text(json.dumps({"format": FORMAT, "about": self._about, "found": found}))
        except OSError as error:
            log.info("%s can't be written (%s): it will be measured again", self.path, error)

    @contextmanager
    def alone(self) -> Iterator[None]:
        """No other process is in here with the same file, if it does not take too long."""
        lock = FileLock(self.path.with_suffix(".lock"), timeout=_PATIENCE)
        with suppress(OSError):  # too long, or a folder that can't be written
            self.path.parent.mkdir(parents=True, exist_ok=True)
            lock.acquire()
        try:
            yield
        finally:
            lock.release()


def named(model: Any) -> bool:
    """Whether a model came from somewhere: nothing is kept of models that were made on the spot."""
    return bool(model.config.name_or_path)


def model_identity(model: Any) -> dict[str, Any]:
    """A model by its name, its configuration and some of its weights."""
    config = {key: value for key, value in model.config.to_dict().items() if key != "transformers_version"}
    digest = hashlib.sha256(json.dumps(config, sort_keys=True, default=str).encode())
    for name, weight in model.named_parameters():
        digest.update(f"{name} {tuple(weight.shape)}".encode())
        digest.update(some_numbers(weight).numpy().tobytes())
    return {"model": model.config.name_or_path, "dtype": str(model.dtype), "weights": digest.hexdigest()[:16]}


def machine_identity(runner: Runner) -> dict[str, Any]:
    """Whatever else the time of a model's forwards depends on: what computes them, on what."""
    device = runner.device
    return {
        "processor": processor() if device.type == "cpu" else torch.cuda.get_device_name(device),
        "threads": torch.get_num_threads(),
        "backend": runner.backend.name,
        "layers": dict(Counter(_computed_by(module) for module in runner.model.modules())),
        "engine": _engine_sources(),
        "torch": torch.__version__,
    }


def _computed_by(module: Any) -> str:
    """The kind of a layer, and the function that takes its place: packed or quantised weights have their own."""
    forward = vars(module).get("forward")
    other = getattr(forward, "func", forward)
    return type(module).__name__ + (f" by {getattr(other, '__qualname__', type(other).__name__)}" if other else "")


@functools.cache
def _engine_sources() -> str:
    """A digest of the engine's code, kernels included: what another version of it takes is another matter."""
    digest = hashlib.sha256()
    for package in ("tot.decoders.engine", "tot.decoders.kernels"):
        for source in sorted(files(package).iterdir(), key=lambda file: file.name):
            if source.name.endswith((".py", ".c")):
                digest.update(source.read_bytes())
    return digest.hexdigest()[:16]
