"""Latency of a forward by its rows and their context, learned from the forwards that are run anyway.

Nothing is measured at start-up. The first estimate comes from the model's sizes, and each forward refines it.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any
from weakref import WeakKeyDictionary

from tot.decoders.engine.runner import Runner
from tot.decoders.models.shapes import Heads

ROWS = (1, 4, 8, 16, 64)
_SHAPE = (1.0, 1.3, 1.7, 2.6, 8.0)
"""First estimate of the seconds of `ROWS`, in multiples of one row's. It is low, so that more rows are tried."""
_BANDWIDTH = 2e10
"""First estimate of the bytes of weights that a second reads."""
_ATTENTION = 0.5
"""First estimate of the cost of an operation of attention, as a multiple of one of a linear layer in many rows."""
_SCALE_RATE, _SHAPE_RATE = 0.02, 0.1
"""Share of an observed deviation by which all rows, and the observed number of rows, are corrected."""
_MAX_RATIO = 4.0
"""Larger deviations are interruptions, say by another process, and count as this ratio."""


@dataclass(frozen=True)
class LatencyModel:
    """Seconds of a forward: linear between the given numbers of rows, plus `key_seconds` per key of each row."""

    rows: tuple[int, ...]
    seconds: tuple[float, ...]
    """Seconds by rows, without attention."""
    key_seconds: float = 0.0

    def at(self, context: float) -> LatencyModel:
        """Return the model for rows that attend to `context` keys each."""
        pairs = zip(self.rows, self.seconds, strict=True)
        return LatencyModel(self.rows, tuple(base + rows * context * self.key_seconds for rows, base in pairs))

    def of(self, rows: float) -> float:
        """Return the seconds of a forward with this many rows."""
        start = self._segment(rows)
        return self.seconds[start] + self.slope(rows) * (rows - self.rows[start])

    def slope(self, rows: float) -> float:
        """Return the seconds that one more row adds."""
        if len(self.rows) == 1:
            return 0.0
        start = self._segment(rows)
        return (self.seconds[start + 1] - self.seconds[start]) / (self.rows[start + 1] - self.rows[start])

    def _segment(self, rows: float) -> int:
        return max(0, min(bisect_right(self.rows, rows) - 1, len(self.rows) - 2))

    def refined(self, rows: int, keys: int, seconds: float, rate: float = _SCALE_RATE) -> LatencyModel:
        """Return the model after a forward of `rows` that attended to `keys` in total, counted once for each row.

        `rate` is the share of the deviation that scales the whole model.
        """
        attention = keys * self.key_seconds
        expected = self.of(rows) + attention
        deviation = math.log(min(max(seconds / expected, 1 / _MAX_RATIO), _MAX_RATIO))
        scale, start = math.exp(rate * deviation), self._segment(rows)
        weights = dict.fromkeys(range(len(self.rows)), 0.0)
        if len(self.rows) > 1:
            share = (rows - self.rows[start]) / (self.rows[start + 1] - self.rows[start])
            weights[start], weights[start + 1] = 1 - min(share, 1.0), min(share, 1.0)
        local = _SHAPE_RATE * deviation * (1 - attention / expected)
        bases = (base * scale * math.exp(local * weights[i]) for i, base in enumerate(self.seconds))
        key_seconds = self.key_seconds * scale * math.exp(_SHAPE_RATE * deviation * attention / expected)
        # More rows never take less time: a smaller estimate is noise.
        return replace(self, seconds=tuple(accumulate(bases, max)), key_seconds=key_seconds)


class Latency:
    """The latency model of one loaded model, refined by the forwards of its runner."""

    def __init__(self, model: LatencyModel) -> None:
        self.model = model
        self._count = 0

    def observe(self, rows: int, keys: int, seconds: float) -> None:
        """Refine the model by a forward. Larger ones than `ROWS` are prompts."""
        if rows <= ROWS[-1] and seconds > 0:
            self._count += 1
            self.model = self.model.refined(rows, keys, seconds, max(_SCALE_RATE, 1 / self._count))


_latencies: WeakKeyDictionary[Any, Latency] = WeakKeyDictionary()
"""By loaded model."""


def latency_model(runner: Runner) -> LatencyModel:
    """Return the latency model of a runner's model. From the first call on, its forwards refine it."""
    latency = _latencies.get(runner.loaded)
    if latency is None:
        latency = _latencies[runner.loaded] = Latency(_first_estimate(runner))
    runner.on_forward = latency.observe
    return latency.model


def _first_estimate(runner: Runner) -> LatencyModel:
    """Estimate from the model's sizes: one row reads all weights, and more rows take longer as `_SHAPE` says."""
    layers, head = runner.loaded.linear_sizes
    seconds = max(1, layers + head) * runner.backend.weight_bytes / _BANDWIDTH
    row = seconds * (_SHAPE[-1] - _SHAPE[-2]) / (ROWS[-1] - ROWS[-2])
    heads, count = Heads.of(runner.loaded.config), int(runner.loaded.config.num_hidden_layers)
    key = row * _ATTENTION * 2 * heads.query * heads.dim * count / max(1, layers + head)
    return LatencyModel(ROWS, tuple(seconds * multiple for multiple in _SHAPE), key)
