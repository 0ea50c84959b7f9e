"""The key-value store of a backend: a pair of tensors per layer, allocated once."""

from __future__ import annotations

from typing import Any, NamedTuple

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
