"""Packing of the weights of linear layers for forward.c: strips of outputs, in the order of multiplication."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

import ml_dtypes
import numpy as np

from tot.decoders.kernels.native.library import empty, lanes, log_once
from tot.decoders.models.families import Mixture
from tot.decoders.models.gguf_quants import QuantizedMatrix
from tot.decoders.models.shapes import EXPERTS, Array
from tot.decoders.models.weights import Weights

PackedKind = Literal["float32", "bfloat16", "gguf"]
"""The format of packed weights; "gguf" is the integers of a file."""
GROUP = 32
"""Inputs that share a scale: GROUP in linear.h."""
_FLOATS: dict[PackedKind, Any] = {"float32": np.dtype(np.float32), "bfloat16": np.dtype(ml_dtypes.bfloat16)}
"""The number formats of the kinds that are not integers."""
_AT_ONCE = 256
"""Outputs packed at a time, so that temporary arrays are small enough for the caches."""
PRODUCTS = {
    "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "out": ("self_attn.o_proj",),
    "gate_up": ("{mlp}.gate_proj", "{mlp}.up_proj"),
    "down": ("{mlp}.down_proj",),
}
"""The linear layers of each product of a layer, by its name in C."""


class Packed(NamedTuple):
    """A packed weight matrix."""

    strips: Array
    """Strips of outputs in the first dimension."""
    bits: int = 0
    """Bits of an integer; 0 for floats. The fields below are for integers, too."""
    group: int = GROUP
    """Inputs that share a scale."""
    unit: float = 1.0
    """Unit of scales and minimums: as float16 multiples of it they keep their precision."""
    zero_point: float = 0.0
    """If no minimums are stored."""
    largest: int = 255
    """The largest integer, after the codebook."""
    codebook: Sequence[int] = ()
    """The integers that 4-bit numbers stand for, from 0 to 255; empty if a number stands for itself."""

    def fits(self, outputs: int, inputs: int, kind: PackedKind) -> bool:
        """Return whether forward.c, which checks nothing, can read this as an (outputs, inputs) matrix of this kind."""
        strips = -(-outputs // (2 * lanes()))
        if floats := _FLOATS.get(kind):
            per_word = 4 // floats.itemsize
            shape = (strips, inputs // per_word, 2 * lanes() * per_word)
            return not self.bits and not inputs % per_word and (self.strips.dtype, self.strips.shape) == (floats, shape)
        coded = (self.bits, self.group, len(self.codebook)) == (4, GROUP, 16) and self.zero_point > 0
        supported = coded or (self.bits in (4, 8) and self.group in (GROUP, GROUP // 2) and not self.codebook)
        if not supported or inputs % GROUP or not (0 < self.unit < math.inf and 0 <= self.zero_point <= 255):
            return False
        most = 15 if self.bits == 4 and not self.codebook else 255
        if not 0 <= self.largest <= most or any(not 0 <= number <= self.largest for number in self.codebook):
            return False
        groups = inputs // self.group
        group_bytes = self.group * self.bits // 8 + (2 if self.zero_point else 4)  # of one output
        shape = (strips, groups, 2 * lanes() * group_bytes)
        return self.strips.dtype == np.uint8 and self.strips.shape == shape


def products_of(config: Any, kind: PackedKind) -> dict[str, list[str]]:
    """Return the linear layers of each product, by name, such as "0.qkv".

    The integers of a file include the embedding: the product "table", or "head" if they are tied."""
    mlp = "mlp" if Mixture.of(config) is None else EXPERTS
    products = {
        f"{number}.{name}": [f"model.layers.{number}.{part.format(mlp=mlp)}" for part in parts]
        for number in range(config.num_hidden_layers)
        for name, parts in PRODUCTS.items()
    }
    tied = config.tie_word_embeddings and kind == "gguf"
    products["head"] = ["model.embed_tokens" if tied else "lm_head"]
    if kind == "gguf" and not tied:
        products["table"] = ["model.embed_tokens"]
    return products


def product_shape(shapes: Mapping[str, tuple[int, ...]], parts: Sequence[str]) -> tuple[int, int]:
    """Return the total outputs, and the inputs, of the linear layers of one product."""
    matrices = [shapes[f"{part}.weight"] for part in parts]
    return sum(shape[0] for shape in matrices), matrices[0][1]


def pack_product(weights: Weights, name: str, parts: Sequence[str], kind: PackedKind) -> Packed:
    """Pack the linear layers of one product."""
    matrices = [weights[f"{part}.weight"] for part in parts]
    if weights.quantized and any(isinstance(matrix, np.ndarray) for matrix in matrices):
        log_once(logging.INFO, "the model stores some matrices as floats: they are rounded to eight bits")
    return packed(joined(matrices, name.endswith("gate_up")), kind)


@np.errstate(over="ignore", invalid="ignore")  # damaged weights may be infinite or NaN
def packed(weight: Array | QuantizedMatrix, kind: PackedKind) -> Packed:
    """Pack a weight (outputs, inputs) into strips."""
    outputs, floats = len(weight), _FLOATS.get(kind)
    zero_point, largest, codebook = 0.0, 255, []
    if isinstance(weight, QuantizedMatrix):
        zero_point, largest = weight.zero_point, int(weight.integers.max())
        if weight.codebook is not None:
            levels, zero_point = weight.levels()
            largest, codebook = int(levels.max()), levels.tolist()
    unit, strips, bits, group = 1.0 if floats else _unit(weight), None, 0, GROUP
    for first in range(0, outputs, _AT_ONCE):
        part = weight[first : first + _AT_ONCE]
        if isinstance(part, np.ndarray) and floats:
            packed_part = _lines(part.astype(floats, copy=False)).view(floats)
        else:
            matrix = part if isinstance(part, QuantizedMatrix) else quantized(part)
            packed_part, bits, group = _integer_strips(matrix, unit), matrix.bits, matrix.group
        if strips is None:
            strips = empty((-(-outputs // (2 * lanes())), *packed_part.shape[1:]), packed_part.dtype)
        begin = first // (2 * lanes())
        strips[begin : begin + len(packed_part)] = packed_part
    assert strips is not None
    return Packed(strips, bits, group, unit, zero_point, largest, codebook)


def _unit(weight: Array | QuantizedMatrix) -> float:
    """Return a power of two such that no scale or minimum is more than 2^15 times it."""
    sizes = (weight.scales, weight.minimums) if isinstance(weight, QuantizedMatrix) else (weight,)
    parts = (size[i : i + _AT_ONCE] for size in sizes if size is not None for i in range(0, len(size), _AT_ONCE))
    largest = max(float(np.abs(part.astype(np.float32, copy=False)).max()) for part in parts)
    return 2.0 ** (math.frexp(largest)[1] - 15) if 0 < largest < math.inf else 1.0


def joined(weights: Sequence[Array | QuantizedMatrix], interleaved: bool) -> Array | QuantizedMatrix:
    """Concatenate weights as `beside` does. Integers of several formats become one common format."""
    if len(weights) == 1:
        return weights[0]
    arrays = [weight for weight in weights if isinstance(weight, np.ndarray)]
    if len(arrays) == len(weights):
        return beside(arrays, interleaved)
    matrices = [weight if isinstance(weight, QuantizedMatrix) else quantized(weight) for weight in weights]
    formats = {
        (matrix.group, matrix.zero_point, None if matrix.codebook is None else matrix.codebook.tobytes())
        for matrix in matrices
    }
    if len(formats) > 1 or matrices[0].minimums is not None:
        group = min(matrix.group for matrix in matrices)
        matrices = [matrix.with_minimums(group) for matrix in matrices]
    integers = beside([matrix.integers for matrix in matrices], interleaved)
    scales = beside([matrix.scales for matrix in matrices], interleaved)
    minimums = [matrix.minimums for matrix in matrices if matrix.minimums is not None]
    return QuantizedMatrix(
        integers,
        scales,
        beside(minimums, interleaved) if minimums else None,
        max(matrix.bits for matrix in matrices),
        matrices[0].zero_point,
        matrices[0].codebook,
    )


def beside(arrays: Sequence[Array], interleaved: bool) -> Array:
    """Concatenate the outputs of arrays. If `interleaved`, take one line of outputs of each in turn."""
    if not interleaved:
        return arrays[0] if len(arrays) == 1 else np.concatenate(arrays)
    parts = [array.reshape(-1, lanes(), *array.shape[1:]) for array in arrays]
    return np.stack(parts, axis=1).reshape(-1, *arrays[0].shape[1:])


def _padded(array: Array) -> Array:
    """Append zero outputs up to a multiple of a strip."""
    missing = -len(array) % (2 * lanes())
    return np.concatenate([array, np.zeros((missing, *array.shape[1:]), array.dtype)]) if missing else array


def _lines(weight: Array) -> Array:
    """Pack (outputs, inputs) into (strips, lines, outputs of a strip), uint32, outputs padded with zeros.

    A word holds adjacent inputs of one output: one float32, two bfloat16 or four integers."""
    words = np.ascontiguousarray(_padded(weight)).view(np.uint32)
    return np.ascontiguousarray(words.reshape(-1, 2 * lanes(), words.shape[1]).swapaxes(1, 2))


def _integer_strips(matrix: QuantizedMatrix, unit: float) -> Array:
    """Pack integers into bytes (strips, groups, ...). Each group has lines as in `_lines`, then float16 scales.

    The scales and minimums are (2, 2, lanes); without minimums the scales are (2, lanes). With 4 bits, every second
    line is stored in the upper halves of the bytes of the line before it."""
    lines = _lines(matrix.integers)
    if matrix.bits == 4:
        lines = lines[:, ::2] | lines[:, 1::2] << 4
    stored = [matrix.scales] if matrix.minimums is None else [matrix.scales, matrix.minimums]
    scales = _padded((np.stack(stored, -1) / np.float32(unit)).astype(np.float16))
    scales = scales.reshape(len(lines), 2, lanes(), -1, len(stored)).transpose(0, 3, 1, 4, 2)
    parts = [np.ascontiguousarray(part).view(np.uint8) for part in (lines, scales)]
    return np.concatenate([part.reshape(len(lines), matrix.scales.shape[1], -1) for part in parts], axis=2)


def quantized(weight: Array) -> QuantizedMatrix:
    """Quantize a weight (outputs, inputs) to integers from 0 to 255, by output and group of inputs."""
    groups = weight.astype(np.float32, copy=False).reshape(len(weight), -1, GROUP)
    minimum, maximum = groups.min(-1), groups.max(-1)
    scale = (maximum - minimum) / np.float32(255)
    integers = np.rint((groups - minimum[..., None]) / np.maximum(scale, np.float32(1e-30))[..., None])
    return QuantizedMatrix(integers.astype(np.uint8).reshape(weight.shape), scale, minimum)
