"""What a forward takes by its rows, measured on the machine and the model at hand when it is first asked for."""

from __future__ import annotations

import time
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any
from weakref import WeakKeyDictionary

from tot.decoders.engine.engine import Engine
from tot.decoders.engine.radix_cache import RadixCacheFullError
from tot.decoders.engine.runner import Chunk, Runner
from tot.decoders.engine.sampling import Draw, read

ROWS = (1, 4, 8, 16, 64)
_CONTEXT = 128
"""Tokens that each row sees."""
_LONG = 0.4
"""Seconds of a forward beyond which more rows are not measured: they take longer in a straight line."""
_DRAW = Draw(1.0, 0, 1.0, 0.0, 0, 0, 0)


@dataclass(frozen=True)
class LatencyModel:
    """Seconds of one forward by its rows, between the points measured and beyond them in straight lines."""

    rows: tuple[int, ...]
    seconds: tuple[float, ...]

    def of(self, rows: int) -> float:
        at = self._piece(rows)
        return self.seconds[at] + self.slope(rows) * (rows - self.rows[at])

    def slope(self, rows: int) -> float:
        """Seconds that one more row adds."""
        if len(self.rows) == 1:
            return 0.0
        at = self._piece(rows)
        return (self.seconds[at + 1] - self.seconds[at]) / (self.rows[at + 1] - self.rows[at])

    def _piece(self, rows: int) -> int:
        return max(0, min(bisect_right(self.rows, rows) - 1, len(self.rows) - 2))

    @classmethod
    def fit(cls, measured: Sequence[tuple[int, float]]) -> LatencyModel:
        """From (rows, seconds) pairs. More rows never take less: where a measurement says so, it is the noise."""
        rows, seconds = zip(*sorted(measured), strict=True)
        return cls(rows, tuple(accumulate(seconds, max)))


_known: WeakKeyDictionary[Any, LatencyModel] = WeakKeyDictionary()
"""By model."""


def latency_model(runner: Runner) -> LatencyModel:
    """Seconds of one forward and its sampling by rows, each row on a branch after a common text: the least of three,
    as whatever disturbs a forward adds to it. Measured once a model, in about twenty forwards; must be called where the
    runner is not at work. Where nothing fits just now it says that rows are free, and the next call measures."""
    if runner.loaded in _known:
        return _known[runner.loaded]
    measured: list[tuple[int, float]] = []
    cache = runner.cache
    base = cache.open()
    try:
        cache.extend(base, [0] * min(_CONTEXT, max(1, cache.capacity // 4), max(1, runner.context // 2)))
        runner.forward([Chunk(base, cache.computed_length(base), len(base), [_DRAW])])
        most = int(runner.loaded.config.vocab_size) - 1  # each branch begins with a token of its own
        for rows in ROWS:
            if rows <= most and (not measured or measured[-1][1] < _LONG):
                measured.append((rows, _least(runner, base, rows)))
    except RadixCacheFullError:
        pass
    finally:
        cache.rollback(base, 0)
    if not measured:
        return LatencyModel((1,), (1.0,))
    return _known.setdefault(runner.loaded, LatencyModel.fit(measured))


def _least(runner: Runner, base: Any, rows: int) -> float:
    _seconds(runner, base, rows)  # warms up
    spent = [_seconds(runner, base, rows)]
    while len(spent) < 3 and sum(spent) < _LONG:
        spent.append(_seconds(runner, base, rows))
    return min(spent)


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
    """`latency_model` of an engine's model, also while the engine is at work."""
    return _known.get(engine.loaded) or engine.call(partial(latency_model, engine.runner))
