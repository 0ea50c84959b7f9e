"""A model's weights by their names in transformers, read lazily.

They are read from a transformers module, a folder of safetensors files, or a GGUF file. The last two need no module: a
backend that packs weights reads each once.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from ml_dtypes import bfloat16
from numpy.typing import DTypeLike

from tot.decoders.errors import ModelError, reason
from tot.decoders.models.families import FAMILIES
from tot.decoders.models.gguf_model import FIRST, Source, is_router, sources_of
from tot.decoders.models.gguf_numbers import Whole, floats_of, numbers_of
from tot.decoders.models.gguf_parts import gguf_parts
from tot.decoders.models.gguf_reader import GGUFFile, read_gguf
from tot.decoders.models.shapes import EMBEDDING, HEAD, Array, Shape, weight_shapes
from tot.decoders.models.stored_parts import Part, stored_parts


class Weights(Mapping[str, "Array | Whole"]):
    """Weights by name."""

    shapes: Mapping[str, Shape]
    files: Sequence[Path] = ()
    """The files that hold the weights, if they are in files."""
    quantized: bool = False
    """Whether a matrix is stored as integers."""

    def __iter__(self) -> Iterator[str]:
        return iter(self.shapes)

    def __len__(self) -> int:
        return len(self.shapes)

    def __contains__(self, name: object) -> bool:
        return name in self.shapes

    def first(self, name: str) -> Array:
        """Return the first numbers of a weight: (FIRST,), or fewer if it is smaller."""
        value = self[name]
        return (value[:1].floats() if isinstance(value, Whole) else value).reshape(-1)[:FIRST]

    def array(self, name: str) -> Array:
        """Return a weight that is not stored as integers."""
        value = self[name]
        assert isinstance(value, np.ndarray), name
        return value


class ModuleWeights(Weights):
    """The parameters of a transformers module."""

    def __init__(self, module: Any) -> None:
        self._parameters = dict(module.named_parameters(remove_duplicate=False))
        config = getattr(module, "config", None)
        known = stored_parts(config, self._parameters) if getattr(config, "model_type", None) in FAMILIES else {}
        self._parts = {name: part for name, part in known.items() if all(one in self._parameters for one in part.names)}
        stored = {one for part in self._parts.values() for one in part.names}
        self._parts |= {name: Part((name,), ()) for name in self._parameters if name not in stored}
        expected = weight_shapes(config) if known else {}
        actual = {name: tuple(self._parameters[part.names[0]].shape) for name, part in self._parts.items()}
        self.shapes = {
            name: expected[name] if actual[name] == part.shape else actual[name] for name, part in self._parts.items()
        }

    def __getitem__(self, name: str) -> Array:
        import torch

        part = self._parts[name]
        weight = part.view(self._parameters[part.names[0]].detach().cpu()).reshape(self.shapes[name])
        if weight.dtype == torch.bfloat16:  # numpy has no such type of its own
            return np.asarray(weight.contiguous().view(torch.uint16).numpy().view(bfloat16))
        return np.asarray(weight.numpy())


class FolderWeights(Weights):
    """The weights in the safetensors files of a folder, in `dtype`, for families in FAMILIES.

    Raises LookupError if a weight has another name, ModelError if a shape differs from config.json, and the errors of
    safetensors for damaged files.
    """

    def __init__(self, folder: Path, config: Any, dtype: DTypeLike) -> None:
        from safetensors import safe_open

        self.shapes = weight_shapes(config)
        self._dtype = dtype
        files = _files_of(folder)
        self._parts = stored_parts(config, files)
        if config.tie_word_embeddings:
            self._parts[HEAD] = self._parts[EMBEDDING]
        stored = {one: part.shape for part in self._parts.values() for one in part.names}
        if missing := stored.keys() - files.keys():
            raise LookupError(min(missing))
        self._files = {name: files[name] for name in stored}
        self.files = sorted({path for path, _ in self._files.values()})
        for path in self.files:
            with safe_open(path, "np") as file:
                for name, own in ((name, own) for name, (holder, own) in self._files.items() if holder == path):
                    _check_shape(name, tuple(file.get_slice(own).get_shape()), stored[name])

    def __getitem__(self, name: str) -> Array:
        part = self._parts[name]
        arrays = [part.view(self._read(stored, part.shape)) for stored in part.names]
        whole = arrays[0] if len(arrays) == 1 else np.concatenate(arrays)
        return whole.reshape(self.shapes[name]).astype(self._dtype, copy=False)

    def _read(self, stored: str, shape: Shape) -> Array:
        from safetensors import SafetensorError, safe_open

        path, own = self._files[stored]
        try:
            with safe_open(path, "np") as file:
                value: Array = file.get_tensor(own)
        except (OSError, SafetensorError) as error:
            raise ModelError(f"{path} can't be read ({reason(error)}): download it again") from error
        _check_shape(stored, tuple(value.shape), shape)  # the file may have changed
        return value


LANGUAGE_MODEL = {r"^(model\.language_model|language_model\.model)\.": "model."}
"""How names in files of models with images begin, as a regular expression, and their beginning in a language model."""


def _files_of(folder: Path) -> dict[str, tuple[Path, str]]:
    """Return the safetensors file of each tensor in a folder, and the tensor's name in it."""
    index = folder / "model.safetensors.index.json"
    if index.exists():
        files = {name: folder / shard for name, shard in json.loads(index.read_text())["weight_map"].items()}
    else:
        from safetensors import safe_open

        path = folder / "model.safetensors"
        with safe_open(path, "np") as file:
            files = dict.fromkeys(file.keys(), path)
    ((pattern, start),) = LANGUAGE_MODEL.items()
    return {re.sub(pattern, start, name): (path, name) for name, path in files.items()}


def _check_shape(name: str, actual: Shape, expected: Shape) -> None:
    if actual != expected:
        raise ModelError(f"the shape of {name} is {actual}, and config.json says {expected}: download the model again")


class GGUFWeights(Weights):
    """The weights of the GGUF file at `path`, whose conversion without matrices is in `folder`.

    Matrices are the integers or floats of the file. Vectors are in `dtype`, or in float32 if bfloat16 does not hold
    the floats. Raises ModelError if the conversion does not match the config.
    """

    def __init__(self, path: Path, folder: Path, config: Any, dtype: DTypeLike) -> None:
        from safetensors import safe_open

        self.folder = folder
        """The folder for packed weights."""
        self.shapes = weight_shapes(config)
        self.files = [*gguf_parts(path), folder / "model.safetensors"]
        self._path, self._config = path, config
        with safe_open(folder / "model.safetensors", "np") as file:
            stored: dict[str, Array] = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            matrices = file.metadata().get("matrices", "integers")
        self.quantized = matrices == "integers"
        self.dtype: np.dtype[Any] = np.dtype(np.float32 if matrices == "float32" else dtype)
        if config.tie_word_embeddings and EMBEDDING in stored:
            stored[HEAD] = stored[EMBEDDING]
        for name, shape in self.shapes.items():
            value = stored.get(name)
            whole = len(shape) == 1 or is_router(name, config)
            if value is None or (value.shape != shape if whole else value.ndim != 1):
                raise ModelError(f"the weight {name} is missing, or its shape differs from config.json")
        routers = {name: stored[name] for name in self.shapes if is_router(name, config)}
        self._stored = {name: stored[name].astype(self.dtype) for name in self.shapes} | routers
        """Vectors, routers, and the first numbers of matrices."""

    @cached_property
    def _file(self) -> GGUFFile:
        return read_gguf(self._path)

    @cached_property
    def _sources(self) -> dict[str, Source]:
        return sources_of(self._config)

    def __getitem__(self, name: str) -> Array | Whole:
        if self._stored[name].shape == self.shapes[name]:
            return self._stored[name]
        source = self._sources[EMBEDDING if name == HEAD and self._config.tie_word_embeddings else name]
        tensor = self._file.tensors[source.name]
        whole = numbers_of(tensor)
        if whole is None:
            return source.take(floats_of(tensor))
        return whole.each(source.take)

    def first(self, name: str) -> Array:
        return self._stored[name].reshape(-1)[:FIRST]

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
