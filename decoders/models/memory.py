"""The memory that several models need together, estimated from their files before any of them is loaded."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from tot.decoders.errors import ModelError
from tot.decoders.models.gguf_model import build_config
from tot.decoders.models.gguf_reader import read_gguf
from tot.decoders.models.loading import folder_config, resolve_dtype, unreadable
from tot.decoders.models.model_names import find_model
from tot.decoders.models.shapes import slot_bytes

MAX_TOKENS = 2**20
"""Limit of the default budget: a search needs fewer tokens, and each takes space in the cache's tables."""
_MIN_TOKENS = 4096
"""Tokens of keys and values that each model needs at least: a prompt with demonstrations and a few samples."""


class Need(NamedTuple):
    """The memory that one model needs, in bytes."""

    name: str
    weights: int
    slot: int
    """Keys and values of one token."""

    @classmethod
    def of(cls, model: str | Path, dtype: str, device: str, integers: bool) -> Need:
        """Estimate the need of a model. `integers`: a .gguf file is computed with the integers that it stores.

        Weights take the size of their file, unless a .gguf file is computed in floating point.
        """
        path, number = find_model(model), resolve_dtype(dtype, device)
        try:
            if path.is_dir():
                config = folder_config(path)
                weights = sum(file.stat().st_size for file in path.glob("*.safetensors"))
            else:
                file = read_gguf(path)
                config = build_config(file)
                tensors = file.tensors.values()
                whole = sum(tensor.data.nbytes for tensor in tensors)
                weights = whole if integers else number.itemsize * sum(math.prod(one.shape) for one in tensors)
            return cls(path.name, weights, slot_bytes(config, number))
        except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
            raise unreadable(str(model), error) from error


def check_memory(needs: Sequence[Need], free: int) -> None:
    """Raise ModelError with the numbers if the models, with a small key-value cache each, exceed the free bytes."""
    sizes = [need.weights + _MIN_TOKENS * need.slot for need in needs]
    if sum(sizes) > free:
        each = ", ".join(f"{need.name} {_gib(size)}" for need, size in zip(needs, sizes, strict=True))
        raise ModelError(
            f"the models need {_gib(sum(sizes))} GiB ({each}) and {_gib(free)} GiB are free: free memory, give smaller "
            "files, or run one of the models on a server, such as --decoder escalate=openai"
        )


def split_budget(needs: Sequence[Need], room: int) -> list[str]:
    """Split `room` bytes of keys and values into a budget for each model, of equally many tokens."""
    tokens = min(MAX_TOKENS, max(_MIN_TOKENS, room // sum(need.slot for need in needs)))
    return [f"{max(tokens * need.slot // 1024, 1)}KiB" for need in needs]


def _gib(size: int) -> str:
    return f"{size / 2**30:.1f}"
