"""A model's weights by their names in transformers, each read when it is asked for.

They come from a transformers module, from a folder of safetensors files, or from a GGUF file. The last two need no
module: a backend that packs weights reads each once.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tot.decoders.errors import ModelError, OptionError, reason
from tot.decoders.models.gguf_convert import FIRST, GGUFFile, dequantized, in_halves, read_gguf, source_names
from tot.decoders.models.gguf_numbers import Whole, numbers_of
from tot.decoders.models.shapes import EMBEDDING, HEAD, Shape, weight_shapes
from tot.decoders.models.supported import LLAMA_LIKE


class Weights(Mapping[str, "Tensor | Whole"]):
    """Weights by name."""

    shapes: Mapping[str, Shape]

    def __iter__(self) -> Iterator[str]:
        return iter(self.shapes)

    def __len__(self) -> int:
        return len(self.shapes)

    def __contains__(self, name: object) -> bool:
        return name in self.shapes

    def first(self, name: str) -> Tensor:
        """(FIRST,) or fewer of the numbers of a weight."""
        return self.tensor(name).flatten()[:FIRST]

    def tensor(self, name: str) -> Tensor:
        """A weight that is no whole numbers."""
        value = self[name]
        assert isinstance(value, Tensor), name
        return value


class ModuleWeights(Weights):
    """The parameters of a transformers module."""

    def __init__(self, module: Any) -> None:
        self._parameters = dict(module.named_parameters(remove_duplicate=False))
        self.shapes = {name: tuple(weight.shape) for name, weight in self._parameters.items()}

    def __getitem__(self, name: str) -> Tensor:
        weight: Tensor = self._parameters[name]
        return weight.detach()


class FolderWeights(Weights):
    """The weights in the safetensors files of a folder, in `dtype`. For LLAMA_LIKE families.

    Raises LookupError where a weight goes by another name, ModelError for weights of other shapes than config.json
    says, and what safetensors raises for damaged files.
    """

    def __init__(self, folder: Path, config: Any, dtype: torch.dtype) -> None:
        from safetensors import safe_open

        self.shapes = weight_shapes(config)
        self._dtype = dtype
        self._stored = {name: name for name in self.shapes}
        if config.tie_word_embeddings:
            self._stored[HEAD] = EMBEDDING
        self._files = _files_of(folder, set(self._stored.values()))
        for path in set(self._files.values()):
            with safe_open(path, "pt") as file:
                for name in (name for name, holder in self._files.items() if holder == path):
                    _check_shape(name, tuple(file.get_slice(name).get_shape()), self.shapes[name])

    def __getitem__(self, name: str) -> Tensor:
        from safetensors import SafetensorError, safe_open

        stored = self._stored[name]
        try:
            with safe_open(self._files[stored], "pt") as file:
                value: Tensor = file.get_tensor(stored)
        except (OSError, SafetensorError) as error:
            raise ModelError(f"{self._files[stored]} can't be read ({reason(error)}): download it again") from error
        _check_shape(name, tuple(value.shape), self.shapes[name])  # the file may have changed
        kept = value.dim() == 1 or name == EMBEDDING  # a view would keep the whole file mapped
        return value.to(self._dtype, copy=kept)


def _files_of(folder: Path, names: set[str]) -> dict[str, Path]:
    """The safetensors file of each weight in a folder. Raises LookupError where one is missing."""
    index = folder / "model.safetensors.index.json"
    if index.exists():
        shards = json.loads(index.read_text())["weight_map"]
        return {name: folder / shards[name] for name in names}
    from safetensors import safe_open

    path = folder / "model.safetensors"
    with safe_open(path, "pt") as file:
        if missing := names - set(file.keys()):
            raise LookupError(min(missing))
    return dict.fromkeys(names, path)


def _check_shape(name: str, found: Shape, expected: Shape) -> None:
    if found != expected:
        raise ModelError(f"the shape of {name} is {found}, and config.json says {expected}: download the model again")


class GGUFWeights(Weights):
    """The weights of the GGUF file at `path`, whose conversion without matrices is in `folder`. Vectors are in `dtype`,
    matrices are the whole numbers of the file. For LLAMA_LIKE families.

    Raises OptionError for other families, ModelError where the conversion does not fit the config.
    """

    def __init__(self, path: Path, folder: Path, config: Any, dtype: torch.dtype) -> None:
        if config.model_type not in LLAMA_LIKE:
            known = ", ".join(LLAMA_LIKE)
            raise OptionError(f"a file's own numbers are computed with for {known}, not {config.model_type}")
        from safetensors.torch import load_file

        self.folder = folder
        """Where packed weights are kept."""
        self.shapes = weight_shapes(config)
        self._path, self._config = path, config
        kept = load_file(folder / "model.safetensors")
        if config.tie_word_embeddings and EMBEDDING in kept:
            kept[HEAD] = kept[EMBEDDING]
        for name, shape in self.shapes.items():
            value = kept.get(name)
            if value is None or value.dim() != 1 or (len(shape) == 1 and tuple(value.shape) != shape):
                raise ModelError(f"the weight {name} is missing, or has another shape than config.json says")
        self._kept = {name: kept[name].to(dtype) for name in self.shapes}
        """Vectors, and the first numbers of matrices."""

    @cached_property
    def _file(self) -> GGUFFile:
        return read_gguf(self._path)

    def __getitem__(self, name: str) -> Tensor | Whole:
        if len(self.shapes[name]) == 1:
            return self._kept[name]
        stored = EMBEDDING if name == HEAD and self._config.tie_word_embeddings else name
        source = source_names([stored], self._config)[stored]
        tensor = self._file.tensors[source]
        whole = numbers_of(tensor)
        if whole is None:
            return in_halves(dequantized(tensor), source, self._config)
        return whole.each(lambda values: in_halves(values, source, self._config))

    def first(self, name: str) -> Tensor:
        return self._kept[name][:FIRST]

    def close_file(self) -> None:
        """Unmap the file until a matrix is asked for again."""
        vars(self).pop("_file", None)


def hash_weights(weights: Weights, dtype: torch.dtype | None = None) -> str:
    """A SHA-256 of the first numbers of each weight, as they are or converted to `dtype`."""
    digest = hashlib.sha256()
    for name in sorted(weights):
        digest.update(f"{name} {weights.shapes[name]}".encode())
        digest.update(weights.first(name).cpu().to(dtype=dtype).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
