"""The family and size class of a model, such as "qwen2-0.5b": fine-tuned and quantized versions share it."""

from __future__ import annotations

import math

from tot.decoders.models.loaded import LoadedModel
from tot.decoders.models.shapes import HEAD


def family_of(model: LoadedModel | None) -> str | None:
    """Return a model's `model_type` and billions of parameters; None without a local model.

    The output head does not count, because files of one model differ in whether they repeat the embeddings in it.
    """
    if model is None:
        return None
    size = sum(math.prod(shape) for name, shape in model.weights.shapes.items() if name != HEAD)
    return f"{model.config.model_type}-{size / 1e9:.1f}b"
