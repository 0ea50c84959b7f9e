"""Weights that a model does not hold itself: they are packed elsewhere, or stay in its file until they are.

A layer keeps their shape, and their first numbers, by which models are told apart.
"""

from __future__ import annotations

import hashlib
import math
from typing import Any

import torch
from torch import Tensor, nn

from tot.decoders.errors import ModelError

FIRST = 64
"""Numbers of each weight by which models are told apart."""


def give_up(layer: Any, first: Tensor | None = None) -> None:
    """Let go of a layer's weight, whose first numbers may be given; only its packed copy computes from now on. One NaN
    stands for all of them, so that their shape, type and device can be read, and nobody takes them for numbers."""
    weight = layer.weight
    first = first_numbers(weight).clone() if first is None else first
    kept = torch.full((), math.nan, dtype=weight.dtype, device=first.device).expand(weight.shape)
    layer.weight = nn.Parameter(kept, requires_grad=False)
    layer.weight.first_numbers = first
    layer.forward = _refuse


def first_numbers(weight: Tensor) -> Tensor:
    """(FIRST,) or fewer of a weight's numbers, also of one that was given up."""
    first: Tensor = getattr(weight, "first_numbers", weight.detach().flatten()[:FIRST])
    return first


def hash_weights(model: Any, dtype: torch.dtype | None = None) -> str:
    """What tells a model from others: a SHA-256 of the first numbers of each weight, as they are or as that type."""
    digest = hashlib.sha256()
    for name, weight in sorted(model.named_parameters(remove_duplicate=False)):
        digest.update(f"{name} {tuple(weight.shape)}".encode())
        digest.update(first_numbers(weight).cpu().to(dtype=dtype).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _refuse(input: Tensor) -> Tensor:
    raise ModelError(
        "this model's weights are held only as the engine that loaded it has packed them: load the model again by "
        "load_model(...), or give that model to the engine"
    )
