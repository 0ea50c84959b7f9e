"""Latency of a forward by its number of rows, measured on first use for each model.

For models in files the measurement is kept in the cache folder for a day, by processor, threads and the model's sizes:
the next process starts a second sooner.
"""

from __future__ import annotations

import hashlib
import json
import time
from bisect import bisect_right
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from itertools import accumulate
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from tot.decoders.engine.engine import Engine
from tot.decoders.engine.radix_cache import RadixCacheFullError
from tot.decoders.engine.runner import Chunk, Runner
from tot.decoders.engine.sampling import Draw, read
from tot.decoders.errors import TaskError
from tot.decoders.files import others_could_write, write_json
from tot.decoders.machine import processor_info, threads
from tot.decoders.models.gguf_cache import cache_folder

ROWS = (1, 4, 8, 16, 64)
_CONTEXT = 128
"""Number of tokens that each row attends to."""
_MAX_SECONDS = 0.4
"""Larger batches are not measured after a forward this slow (seconds): latency is then linear in rows."""
_KEPT_SECONDS = 86_400
"""How long a measurement in the cache folder is used."""
_DRAW = Draw(1.0, 0, 1.0, 0.0, 0, 0, 0)


@dataclass(frozen=True)
class LatencyModel:
    """Seconds of one forward by its number of rows, interpolated and extrapolated linearly."""

    rows: tuple[int, ...]
    seconds: tuple[float, ...]

    def of(self, rows: int) -> float:
        """Return the seconds of a forward with this many rows."""
        start = self._segment(rows)
        return self.seconds[start] + self.slope(rows) * (rows - self.rows[start])

    def slope(self, rows: int) -> float:
        """Return the seconds that one more row adds."""
        if len(self.rows) == 1:
            return 0.0
        start = self._segment(rows)
        return (self.seconds[start + 1] - self.seconds[start]) / (self.rows[start + 1] - self.rows[start])

    def _segment(self, rows: int) -> int:
        return max(0, min(bisect_right(self.rows, rows) - 1, len(self.rows) - 2))

    @classmethod
    def fit(cls, measured: Sequence[tuple[int, float]]) -> LatencyModel:
        """Fit (rows, seconds) pairs. Latency never decreases with rows: a smaller measurement is noise."""
        rows, seconds = zip(*sorted(measured), strict=True)
        return cls(rows, tuple(accumulate(seconds, max)))


_latency_models: WeakKeyDictionary[Any, LatencyModel] = WeakKeyDictionary()
"""The latency model of each loaded model."""


def latency_model(runner: Runner) -> LatencyModel:
    """Measure the seconds of one forward and its sampling by rows, once per model, in about twenty forwards.

    Each row is a branch after a common text. The result is the minimum of three, because disturbances only add time.
    Call this only while the runner is idle. If nothing fits into the cache now, the result is one second for any number
    of rows, and the next call measures again.
    """
    if runner.loaded in _latency_models:
        return _latency_models[runner.loaded]
    path = None if runner.loaded.module is not None else _file_of(runner)
    if path is not None and (stored := _stored(path)) is not None:
        return _latency_models.setdefault(runner.loaded, stored)
    measured: list[tuple[int, float]] = []
    cache = runner.cache
    base = cache.open()
    try:
        cache.extend(base, [0] * min(_CONTEXT, max(1, cache.capacity // 4), max(1, runner.context // 2)))
        runner.forward([Chunk(base, cache.computed_length(base), len(base), [_DRAW])])
        max_rows = int(runner.loaded.config.vocab_size) - 1  # each branch begins with a different token
        for rows in ROWS:
            if rows <= max_rows and (not measured or measured[-1][1] < _MAX_SECONDS):
                measured.append((rows, _min_seconds(runner, base, rows)))
    except RadixCacheFullError:
        pass
    finally:
        cache.rollback(base, 0)
    if not measured:
        return LatencyModel((1,), (1.0,))
    fitted = LatencyModel.fit(measured)
    if path is not None:
        with suppress(OSError, TaskError):  # without the file the next process measures again
            path.parent.mkdir(parents=True, exist_ok=True)
            write_json(path, {"rows": fitted.rows, "seconds": fitted.seconds})
            path.chmod(0o600)
    return _latency_models.setdefault(runner.loaded, fitted)


def _file_of(runner: Runner) -> Path:
    """The file of a measurement in the cache folder."""
    config = runner.loaded.config
    names = ("model_type", "num_hidden_layers", "hidden_size", "intermediate_size", "num_key_value_heads", "vocab_size")
    about = [version("tot"), processor_info("model name"), threads(), runner.backend.name]
    about += [str(runner.dtype), runner.device, runner.backend.weight_bytes]
    about += [getattr(config, name, None) for name in names]
    key = hashlib.sha256(json.dumps(about).encode()).hexdigest()[:24]
    return cache_folder() / "latency" / f"{key}.json"


def _stored(path: Path) -> LatencyModel | None:
    """Read a measurement; None if it is missing, too old, damaged or possibly another user's."""
    try:
        if others_could_write(path, trust_root=True) or not 0 <= time.time() - path.stat().st_mtime < _KEPT_SECONDS:
            return None
        data = json.loads(path.read_text())
        rows, seconds = tuple(map(int, data["rows"])), tuple(map(float, data["seconds"]))
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        return None
    known = rows == ROWS[: len(rows)] and len(rows) == len(seconds) > 0
    rising = known and seconds[0] > 0 and list(seconds) == sorted(seconds) and seconds[-1] < 1e4
    return LatencyModel(rows, seconds) if rising else None


def _min_seconds(runner: Runner, base: Any, rows: int) -> float:
    """Return the minimum of up to three measurements after a warm-up."""
    _seconds(runner, base, rows)
    times = [_seconds(runner, base, rows)]
    while len(times) < 3 and sum(times) < _MAX_SECONDS:
        times.append(_seconds(runner, base, rows))
    return min(times)


def _seconds(runner: Runner, base: Any, rows: int) -> float:
    forks = [runner.cache.fork(base) for _ in range(rows)]
    try:
        for token, fork in enumerate(forks):
            runner.cache.extend(fork, [1 + token])
        began = time.perf_counter()
        forward = runner.forward([Chunk(fork, len(base), len(fork), [_DRAW]) for fork in forks])
        read(forward.logits, [_DRAW] * len(forward.logits))
        return time.perf_counter() - began
    finally:
        for fork in forks:
            runner.cache.rollback(fork, 0)


def engine_latency_model(engine: Engine) -> LatencyModel:
    """Return the latency model of an engine's model. Safe while the engine runs."""
    return _latency_models.get(engine.loaded) or engine.call(partial(latency_model, engine.runner))
