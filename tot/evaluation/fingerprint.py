"""Identify the inputs of a run: library versions, and hashes of model and data files."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

from tot.decoders.cache import hash_files
from tot.decoders.errors import OptionError, reason
from tot.decoders.models.model_names import gguf_parts
from tot.decoders.request import Purpose

_LIBRARIES = ("tot", "torch", "transformers", "datasets")
_FILES = ("*.safetensors", "*config.json", "tokenizer.*", "vocab.*", "merges.txt", "*tokens*.json", "*.jinja")
"""The files of a model folder on which its texts depend: also its sampling filters and its chat template."""


def versions() -> dict[str, str]:
    """Return the versions of Python and of the libraries that results depend on."""
    return {"python": platform.python_version(), **{name: version(name) for name in _LIBRARIES}}


def hash_model(model: Any) -> str | None:
    """Return the SHA-256 of a model's files, found by name or path.

    For a model object, hash the first numbers of each parameter; for None, return None. Raises ModelError for an
    unknown name.
    """
    if isinstance(model, str | Path):
        from tot.decoders.models.model_names import find_model

        return hash_path(find_model(model))
    if model is None:
        return None
    from tot.decoders.models.weights import ModuleWeights, hash_weights

    return hash_weights(ModuleWeights(model))


def hash_models(weights: Mapping[Purpose, Any]) -> dict[str, str | None]:
    """Return the hash of the first model as `model_sha256`, and the hashes of other models by purpose.

    `weights` has the models, or their names, by purpose. Raises ModelError for an unknown name.
    """
    first = next(iter(weights.values()), None)
    others = {f"{purpose}_sha256": hash_model(one) for purpose, one in weights.items() if one != first}
    return {"model_sha256": hash_model(first), **others}


def hash_path(path: Path) -> str:
    """Return the SHA-256 of a file or of a model folder's files. Raises OptionError if a file can't be read."""
    files = sorted({file for pattern in _FILES for file in path.glob(pattern)}) if path.is_dir() else gguf_parts(path)
    try:
        return hash_files(files)
    except OSError as error:
        raise OptionError(f"{path} can't be read: {reason(error)}") from None
