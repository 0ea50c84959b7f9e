"""Names of models: family and size, such as "qwen2-0.5b", and with a checksum that tells fine-tuned versions apart."""

from __future__ import annotations

import math
import zlib

from ml_dtypes import bfloat16

from tot.decoders.models.loaded import LoadedModel
from tot.decoders.models.shapes import HEAD


def family_of(model: LoadedModel | None) -> str | None:
    """Return a model's `model_type` and billions of parameters, which fine-tuned versions share; None if not local.

    The output head does not count, because files of one model differ in whether they repeat the embeddings in it.
    """
    if model is None:
        return None
    size = sum(math.prod(shape) for name, shape in model.weights.shapes.items() if name != HEAD)
    return f"{model.config.model_type}-{size / 1e9:.1f}b"


def identity_of(model: LoadedModel | None) -> str | None:
    """Return the family of a model and a checksum of its last norm; None without a local model or such a norm.

    Quantized versions share it, because norms are not quantized. Full fine-tuning changes it; LoRA adapters don't.
    """
    if model is None or (norm := "model.norm.weight") not in model.weights:
        return None
    return f"{family_of(model)}-{zlib.crc32(model.weights.first(norm).astype(bfloat16).tobytes()):08x}"
