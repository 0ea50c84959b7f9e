"""The smallest time of a forward pass: the machine's peak rates, and the operations and bytes of a model (a roofline).

    operations = 2 x parameters of linear layers x rows + 4 x layers x heads x head_dim x (pairs of a row and a key)

The logits layer counts for all rows. Weights count with their stored size.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

import torch

from tot.decoders.models.loaded import LoadedModel
from tot.decoders.models.shapes import Heads

_RUNS = 5
_BYTES = 2**28
_SIZE = 2048


class Demand(NamedTuple):
    """The minimum operations and bytes of a model's forward passes."""

    weights: int
    """Number of weights of the linear layers and the logits layer."""
    weight_size: float
    """Bytes per weight."""
    key_operations: int
    """Operations per pair of a row and an attended key."""

    @classmethod
    def of(cls, loaded: LoadedModel, weight_size: float) -> Demand:
        """Compute the demand of a loaded model with `weight_size` bytes per weight."""
        config, heads = loaded.config, Heads.of(loaded.config)
        return cls(sum(loaded.linear_sizes), weight_size, 4 * config.num_hidden_layers * heads.query * heads.dim)

    @property
    def weight_bytes(self) -> int:
        return round(self.weight_size * self.weights)

    def operations(self, rows: int, keys: int) -> int:
        """Return the operations of `rows` rows, of which each attends to `keys` keys."""
        return rows * (2 * self.weights + self.key_operations * keys)


def read_bandwidth(device: str = "cpu", size: int = _BYTES) -> float:
    """Measure the read bandwidth of all threads, in bytes per second, with a sum over `size` bytes.

    `size` should exceed the caches. To bound the time to read weights, pass their size, so that caches have the same
    effect.
    """
    values = torch.ones(size // 8, dtype=torch.int64, device=device)  # the sum of integers is vectorized
    return size / _best(values.sum, device)


def matrix_rate(dtype: str = "bfloat16", device: str = "cpu", size: int = _SIZE) -> float:
    """Measure floating-point operations per second of a product of two `size` x `size` matrices (2 size³ of them)."""
    left, right = (torch.rand(size, size, device=device).to(getattr(torch, dtype)) for _ in range(2))
    return 2 * size**3 / _best(lambda: left @ right, device)


def limit(weight_bytes: float, operations: float, bandwidth: float, rate: float) -> float:
    """Return the minimum seconds of a forward pass: of reading its weights (bytes), or of its operations."""
    return max(weight_bytes / bandwidth, operations / rate)


def _best(work: Callable[[], object], device: str) -> float:
    """Return the seconds of the fastest run, after a warm-up run."""
    times = []
    with torch.inference_mode():
        for _ in range(_RUNS + 1):
            began = time.perf_counter()
            work()
            if device != "cpu":
                torch.cuda.synchronize(device)
            times.append(time.perf_counter() - began)
    return min(times[1:])
