"""The key-value store of a backend: a pair of tensors per layer, allocated once."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from tot.decoders.models.shapes import Heads

SCRATCH = 0
"""The slot that is never read. Rows that are computed only for their logits write there."""


class Store(NamedTuple):
    """Keys and values, one tensor (kv_heads, slots, head_dim) per layer."""

    keys: tuple[Tensor, ...]
    values: tuple[Tensor, ...]

    @classmethod
    def allocate(cls, config: Any, slots: int, dtype: torch.dtype, device: torch.device) -> Store:
        """Allocate `slots` slots, including SCRATCH."""
        heads = Heads.of(config)

        def tensors() -> tuple[Tensor, ...]:
            layers = [
                torch.empty((heads.kv, slots, heads.dim), dtype=dtype, device=device)
                for _ in range(config.num_hidden_layers)
            ]
            for tensor in layers:
                tensor[:, SCRATCH] = 0
            return tuple(layers)

        return cls(tensors(), tensors())

    def bytes_of(self, slots: int) -> int:
        """Return the size of `slots` slots, in bytes."""
        return sum(len(array) * slots * array.shape[2] for array in self._arrays)

    def read(self, slots: Sequence[int]) -> bytes:
        """Return a copy of the keys and values in slots."""
        return b"".join(array[:, slots].tobytes() for array in self._arrays)

    def write(self, slots: Sequence[int], content: memoryview) -> None:
        """Set the keys and values in slots to what `read` returned for as many slots."""
        start = 0
        for array in self._arrays:
            shape = len(array), len(slots), array.shape[2]
            size = math.prod(shape)
            array[:, slots] = np.frombuffer(content[start : start + size], dtype=np.uint8).reshape(shape)
            start += size

    @property
    def _arrays(self) -> Iterator[np.ndarray[Any, np.dtype[np.uint8]]]:
        """The bytes of keys and values, (kv_heads, slots, bytes) for each layer."""
        return (array.view(torch.uint8).numpy() for array in (*self.keys, *self.values))
