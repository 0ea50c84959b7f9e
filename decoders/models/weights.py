"""A model's weights by their names in transformers, read lazily.

They are read from a transformers module, a folder of safetensors files, or a GGUF file. The last two need no module: a
backend that packs weights reads each once.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from ml_dtypes import bfloat16
from numpy.typing import DTypeLike

from tot.decoders.errors import ModelError, OptionError, reason
from tot.decoders.models.gguf_convert import FIRST, GGUFFile, dequantized, in_halves, read_gguf, source_names
from tot.decoders.models.gguf_numbers import Whole, numbers_of
from tot.decoders.models.shapes import EMBEDDING, HEAD, Array, Shape, weight_shapes
from tot.decoders.models.supported import LLAMA_LIKE


class Weights(Mapping[str, "Array | Whole"]):
    """Weights by name."""

    shapes: Mapping[str, Shape]
    files: Sequence[Path] = ()
    """The files that hold the weights, if they are in files."""

    def __iter__(self) -> Iterator[str]:
        return iter(self.shapes)

    def __len__(self) -> int:
        return len(self.shapes)

    def __contains__(self, name: object) -> bool:
        return name in self.shapes

    def first(self, name: str) -> Array:
        """Return the first numbers of a weight: (FIRST,), or fewer if it is smaller."""
        return self.array(name).reshape(-1)[:FIRST]

    def array(self, name: str) -> Array:
        """Return a weight that is not stored as integers."""
        value = self[name]
        assert isinstance(value, np.ndarray), name
        return value


class ModuleWeights(Weights):
    """The parameters of a transformers module."""

    def __init__(self, module: Any) -> None:
        self._parameters = dict(module.named_parameters(remove_duplicate=False))
        self.shapes = {name: tuple(weight.shape) for name, weight in self._parameters.items()}

    def __getitem__(self, name: str) -> Array:
        import torch

        weight = self._parameters[name].detach().cpu()
        if weight.dtype == torch.bfloat16:  # numpy has no such type of its own
            return np.asarray(weight.view(torch.uint16).numpy().view(bfloat16))
        return np.asarray(weight.numpy())


class FolderWeights(Weights):
    """The weights in the safetensors files of a folder, in `dtype`, for LLAMA_LIKE families.

    Raises LookupError if a weight has another name, ModelError if a shape differs from config.json, and the errors of
    safetensors for damaged files.
    """

    def __init__(self, folder: Path, config: Any, dtype: DTypeLike) -> None:
        from safetensors import safe_open

        self.shapes = weight_shapes(config)
        self._dtype = dtype
        self._stored = {name: name for name in self.shapes}
        if config.tie_word_embeddings:
            self._stored[HEAD] = EMBEDDING
        self._files = _files_of(folder, set(self._stored.values()))
        self.files = sorted(set(self._files.values()))
        for path in self.files:
            with safe_open(path, "np") as file:
                for name in (name for name, holder in self._files.items() if holder == path):
                    _check_shape(name, tuple(file.get_slice(name).get_shape()), self.shapes[name])

    def __getitem__(self, name: str) -> Array:
        from safetensors import SafetensorError, safe_open

        stored = self._stored[name]
        try:
            with safe_open(self._files[stored], "np") as file:
                value: Array = file.get_tensor(stored)
        except (OSError, SafetensorError) as error:
            raise ModelError(f"{self._files[stored]} can't be read ({reason(error)}): download it again") from error
        _check_shape(name, tuple(value.shape), self.shapes[name])  # the file may have changed
        return value.astype(self._dtype, copy=False)


def _files_of(folder: Path, names: set[str]) -> dict[str, Path]:
    """Return the safetensors file of each weight in a folder. Raises LookupError if one is missing."""
    index = folder / "model.safetensors.index.json"
    if index.exists():
        shards = json.loads(index.read_text())["weight_map"]
        return {name: folder / shards[name] for name in names}
    from safetensors import safe_open

    path = folder / "model.safetensors"
    with safe_open(path, "np") as file:
        if missing := names - set(file.keys()):
            raise LookupError(min(missing))
    return dict.fromkeys(names, path)


def _check_shape(name: str, actual: Shape, expected: Shape) -> None:
    if actual != expected:
        raise ModelError(f"the shape of {name} is {actual}, and config.json says {expected}: download the model again")


class GGUFWeights(Weights):
    """The weights of the GGUF file at `path`, whose conversion without matrices is in `folder`.

    Vectors are in `dtype`, matrices are the integers of the file. Supports LLAMA_LIKE families: raises OptionError for
    other families, ModelError if the conversion does not match the config.
    """

    def __init__(self, path: Path, folder: Path, config: Any, dtype: DTypeLike) -> None:
        if config.model_type not in LLAMA_LIKE:
            known = ", ".join(LLAMA_LIKE)
            raise OptionError(f"the integers of a .gguf file are supported for {known}, not {config.model_type}")
        from safetensors.numpy import load_file

        self.folder = folder
        """The folder for packed weights."""
        self.shapes = weight_shapes(config)
        self.files = [path, folder / "model.safetensors"]
        self._path, self._config = path, config
        stored = load_file(folder / "model.safetensors")
        if config.tie_word_embeddings and EMBEDDING in stored:
            stored[HEAD] = stored[EMBEDDING]
        for name, shape in self.shapes.items():
            value = stored.get(name)
            if value is None or value.ndim != 1 or (len(shape) == 1 and tuple(value.shape) != shape):
                raise ModelError(f"the weight {name} is missing, or its shape differs from config.json")
        self._stored = {name: stored[name].astype(dtype) for name in self.shapes}
        """Vectors, and the first numbers of matrices."""

    @cached_property
    def _file(self) -> GGUFFile:
        return read_gguf(self._path)

    @cached_property
    def _sources(self) -> dict[str, str]:
        """The names in the file, by their names in transformers."""
        return source_names(self.shapes, self._config)

    def __getitem__(self, name: str) -> Array | Whole:
        if len(self.shapes[name]) == 1:
            return self._stored[name]
        source = self._sources[EMBEDDING if name == HEAD and self._config.tie_word_embeddings else name]
        tensor = self._file.tensors[source]
        whole = numbers_of(tensor)
        if whole is None:
            return in_halves(dequantized(tensor), source, self._config)
        return whole.each(lambda values: in_halves(values, source, self._config))

    def first(self, name: str) -> Array:
        return self._stored[name][:FIRST]

    def close_file(self) -> None:
        """Unmap the file until a matrix is read again."""
        vars(self).pop("_file", None)


def hash_weights(weights: Weights, dtype: DTypeLike | None = None) -> str:
    """Return a SHA-256 of the first numbers of each weight, optionally converted to `dtype`."""
    digest = hashlib.sha256()
    for name in sorted(weights):
        digest.update(f"{name} {weights.shapes[name]}".encode())
        numbers = weights.first(name)
        digest.update((numbers if dtype is None else numbers.astype(dtype)).tobytes())
    return digest.hexdigest()
