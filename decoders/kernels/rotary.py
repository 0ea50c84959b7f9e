"""Keys at other positions: a rotary embedding turns a key by its position, so moving it is one more turn.

RoFormer (Su et al., 2021), section 3.2.2. It knows the embedding and tensors, no store.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tot.decoders.errors import ModelError

_FIXED = ("default", "linear", "llama3", "yarn")
"""Kinds of embeddings whose frequencies don't depend on the length of the text."""


def inverse_frequencies(model: Any) -> Tensor:
    """Radians a position, by pair of dimensions: (half the dimensions that are turned,). Raises ModelError where they
    are not the same at every position."""
    embedding: Any = getattr(model.base_model, "rotary_emb", None)
    kind = getattr(embedding, "rope_type", "none")
    if kind not in _FIXED:
        raise ModelError(f"keys of a model with {kind} rotary positions can't be moved: leave reuse_keys off")
    inverse: Tensor = embedding.inv_freq.float()
    return inverse


def turned(keys: Tensor, angles: Tensor) -> Tensor:
    """Keys (…, head_dim) turned by an angle a pair of dimensions: dimension i goes with i + len(angles)."""
    half = len(angles)
    whole = keys.float()
    first, second, rest = whole[..., :half], whole[..., half : 2 * half], whole[..., 2 * half :]
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], dim=-1).to(keys.dtype)
