"""The store of keys and values that a backend owns: a pair of tensors a layer, allocated once."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from tot.decoders.models.shapes import Heads

SCRATCH = 0
"""The slot that nobody reads: rows that are computed only for their logits write there."""


class Store(NamedTuple):
    """A layer each: (kv_heads, slots, head_dim)."""

    keys: tuple[Tensor, ...]
    values: tuple[Tensor, ...]

    @classmethod
    def allocate(cls, config: Any, slots: int, dtype: torch.dtype, device: torch.device) -> Store:
        """Room for so many slots, SCRATCH among them."""
        heads = Heads.of(config)

        def tensors() -> tuple[Tensor, ...]:
            made = [
                torch.empty((heads.kv, slots, heads.dim), dtype=dtype, device=device)
                for _ in range(config.num_hidden_layers)
            ]
            for tensor in made:
                tensor[:, SCRATCH] = 0
            return tuple(made)

        return cls(tensors(), tensors())
