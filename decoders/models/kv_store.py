"""The key-value store of a backend: a pair of arrays per layer, allocated once."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from tot.decoders.models.shapes import Heads

SCRATCH = 0
"""The slot that is never read. Rows that are computed only for their logits write there."""

MOST_TOKENS = 2**20
"""Limit of the default budget: a search needs fewer tokens, and each takes space in the cache's tables."""


class Store(NamedTuple):
    """Keys and values, one array (kv_heads, slots, head_dim) per layer."""

    keys: tuple[Any, ...]
    values: tuple[Any, ...]

    @classmethod
    def allocate(cls, config: Any, slots: int, make: Callable[[tuple[int, int, int]], Any]) -> Store:
        """Allocate `slots` slots, including SCRATCH. `make` makes an array of a shape."""
        heads = Heads.of(config)

        def arrays() -> tuple[Any, ...]:
            return tuple(make((heads.kv, slots, heads.dim)) for _ in range(config.num_hidden_layers))

        return cls(arrays(), arrays())

    def bytes_of(self, slots: int) -> int:
        """Return the size of `slots` slots, in bytes."""
        return sum(len(array) * slots * array.shape[2] for array in self._bytes())

    def read(self, slots: Sequence[int]) -> bytes:
        """Return a copy of the keys and values in slots. Only for numpy's arrays."""
        return b"".join(array[:, slots].tobytes() for array in self._bytes())

    def write(self, slots: Sequence[int], content: memoryview) -> None:
        """Set the keys and values in slots to the result of `read` for the same number of slots."""
        start = 0
        for array in self._bytes():
            shape = len(array), len(slots), array.shape[2]
            size = math.prod(shape)
            array[:, slots] = np.frombuffer(content[start : start + size], dtype=np.uint8).reshape(shape)
            start += size

    def _bytes(self) -> Iterator[np.ndarray[Any, np.dtype[np.uint8]]]:
        """Yield the bytes of each layer's keys, then of its values: (kv_heads, slots, bytes)."""
        return (array.view(np.uint8) for array in (*self.keys, *self.values))
