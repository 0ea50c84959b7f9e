"""A model's weights by their names in transformers, read lazily from a transformers module or safetensors files.

The weights in files need no module: a backend that packs weights reads each once. A GGUF file's are in `gguf_model.py`.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from functools import cached_property, partial
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from ml_dtypes import bfloat16
from numpy.typing import DTypeLike

from tot.decoders.errors import ModelError, reason
from tot.decoders.models.families import FAMILIES, Mixture, family_of
from tot.decoders.models.gguf_quants import QuantizedMatrix
from tot.decoders.models.shapes import EMBEDDING, EXPERTS, HEAD, Array, Shape, weight_shapes

FIRST = 64
"""Numbers of each weight that identify a model."""


class Weights(Mapping[str, "Array | QuantizedMatrix"]):
    """Weights by name."""

    shapes: Mapping[str, Shape]
    files: Sequence[Path] = ()
    """The files that hold the weights, if they are in files."""
    integers: bool = False
    """Whether weights are as a GGUF file stores them."""
    quantized: bool = False
    """Whether a matrix is a QuantizedMatrix."""

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

    @cached_property
    def identity(self) -> str:
        """A hash that identifies the model in any storage format: of the first numbers of each weight, as bfloat16."""
        return hash_weights(self, bfloat16)


def hash_weights(weights: Weights, dtype: DTypeLike | None = None) -> str:
    """Return a SHA-256 of the first numbers of each weight, optionally converted to `dtype`."""
    digest = hashlib.sha256()
    for name in sorted(weights):
        digest.update(f"{name} {weights.shapes[name]}".encode())
        numbers = weights.first(name)
        digest.update((numbers if dtype is None else numbers.astype(dtype)).tobytes())
    return digest.hexdigest()


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

        weight = self._view(name).cpu().reshape(self.shapes[name])
        if weight.dtype == torch.bfloat16:  # numpy has no such type of its own
            return np.asarray(weight.contiguous().view(torch.uint16).numpy().view(bfloat16))
        return np.asarray(weight.numpy())

    def assign(self, weights: Weights) -> None:
        """Copy other weights of the same names and shapes into the module."""
        import torch

        for name in weights:
            view, values = self._view(name), weights.array(name)
            tensor = torch.from_numpy(np.ascontiguousarray(values, np.float32))
            view.copy_(tensor.reshape(view.shape))

    def _view(self, name: str) -> Any:
        part = self._parts[name]
        return part.view(self._parameters[part.names[0]].detach())


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


class Part(NamedTuple):
    """A weight as a part of one tensor that transformers stores, or as several tensors one after another."""

    names: tuple[str, ...]
    shape: Shape
    """The shape of each stored tensor."""
    view: Callable[[Any], Any] = lambda stored: stored
    """Return a view of a stored array of numpy or torch; its numbers, in order, are the weight's."""


def stored_parts(config: Any, names: Container[str]) -> dict[str, Part]:
    """Return where each weight is stored, by name. `names` are the stored tensors: some families have two layouts."""
    mixture = Mixture.of(config)
    parts = whole_parts(config)
    if mixture is not None:
        for number in range(config.num_hidden_layers):
            parts |= _expert_parts(f"model.layers.{number}.{EXPERTS}.", config, mixture, names)
    return parts


def whole_parts(config: Any) -> dict[str, Part]:
    """Return where each weight is stored if all experts are one matrix: alone, or as rows of a larger one."""
    family, shapes = family_of(config), weight_shapes(config)
    parts = {name: Part((name,), shape) for name, shape in shapes.items()}
    for number in range(config.num_hidden_layers):
        for stored, stems in family.fused.items():
            names, first = [f"model.layers.{number}.{stem}.weight" for stem in stems], 0
            whole = (sum(shapes[name][0] for name in names), shapes[names[0]][1])
            for name in names:
                rows = slice(first, first := first + shapes[name][0])
                parts[name] = Part((f"model.layers.{number}.{stored}.weight",), whole, itemgetter(rows))
    return parts


def _of_experts(stored: Any, part: slice = slice(None), transposed: bool = False) -> Any:
    """Return a view of the gates, or of the ups, of all experts, which follow each other or are stored in turn."""
    if transposed:  # (experts, inputs, outputs)
        stored = stored.swapaxes(1, 2)
    return stored[:, part]


def _expert_parts(place: str, config: Any, mixture: Mixture, names: Container[str]) -> dict[str, Part]:
    """Return where the experts of one layer are stored: one tensor for each kind of layer, or for each expert."""
    experts = family_of(config).experts
    assert experts is not None
    count, inner, hidden = mixture.experts, mixture.inner, config.hidden_size
    if f"{place}0.gate_proj.weight" in names:
        shapes = {"gate": (inner, hidden), "up": (inner, hidden), "down": (hidden, inner)}
        return {
            f"{place}{name}_proj.weight": Part(
                tuple(f"{place}{expert}.{name}_proj.weight" for expert in range(count)), shape
            )
            for name, shape in shapes.items()
        }
    turned = experts.transposed
    gates, ups = (slice(0, None, 2), slice(1, None, 2)) if turned else (slice(inner), slice(inner, None))
    parts = {}
    for name, stem, rows in (("gate", "gate_up", gates), ("up", "gate_up", ups), ("down", "down", slice(None))):
        stored, (outputs, inputs) = f"{place}{stem}_proj", (hidden, inner) if stem == "down" else (2 * inner, hidden)
        shape = (count, inputs, outputs) if turned else (count, outputs, inputs)
        view = partial(_of_experts, part=rows)
        parts[f"{place}{name}_proj.weight"] = Part((stored,), shape, partial(view, transposed=turned))
        if experts.biased:
            parts[f"{place}{name}_proj.bias"] = Part((f"{stored}_bias",), (count, outputs), view)
    return parts
