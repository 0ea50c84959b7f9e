"""The key-value store of a backend: a pair of arrays per layer, allocated once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from tot.decoders.models.shapes import Heads

SCRATCH = 0
"""The slot that is never read. Rows that are computed only for their logits write there."""


class Store(NamedTuple):
    """Keys and values, one array (kv_heads, slots, head_dim) per layer."""

    keys: tuple[Any, ...]
    values: tuple[Any, ...]

    @classmethod
    def allocate(cls, config: Any, slots: int, make: Callable[[tuple[int, int, int]], Any]) -> Store:
        """Allocate `slots` slots, including SCRATCH. `make` makes an array of a shape, with zeros in SCRATCH."""
        heads = Heads.of(config)

        def arrays() -> tuple[Any, ...]:
            return tuple(make((heads.kv, slots, heads.dim)) for _ in range(config.num_hidden_layers))

        return cls(arrays(), arrays())
