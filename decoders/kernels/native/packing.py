"""Packing of the weights of linear layers for forward.c: strips of outputs, in the order of multiplication."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal, NamedTuple

import ml_dtypes
import numpy as np

from tot.decoders.kernels.native.library import empty, lanes, largest_byte, log_once
from tot.decoders.machine import free_memory
from tot.decoders.models.gguf_numbers import Whole
from tot.decoders.models.shapes import Array

PackedKind = Literal["float32", "bfloat16", "int8-dynamic", "gguf"]
GROUP = 32
"""Inputs that share a scale: GROUP in linear.h."""
_FLOATS: dict[PackedKind, Any] = {"float32": np.dtype(np.float32), "bfloat16": np.dtype(ml_dtypes.bfloat16)}
"""The number formats of the kinds that are not integers."""
_AT_ONCE = 256
"""Outputs packed at a time, so that temporary arrays are small enough for the caches."""


def room_for(what: str, needed: float, device: str) -> bool:
    """Return whether `needed` bytes are free to pack `what`. If not, log it once."""
    free = free_memory(device)
    if needed > free:
        sizes = f"{needed / 2**30:.1f} GiB, and {free / 2**30:.1f} are free"
        log_once(logging.WARNING, f"decoding is slower, as packing {what} needs {sizes}: free memory to decode faster")
    return needed <= free


class Packed(NamedTuple):
    """A packed weight matrix."""

    strips: Array
    """Strips of outputs in the first dimension."""
    bits: int = 0
    """Bits of an integer; 0 for floats. The fields below are for integers, too."""
    group: int = GROUP
    """Inputs that share a scale."""
    unit: float = 1.0
    """Unit of scales (`step`) and minimums (`least`): as float16 multiples of it they keep their precision."""
    middle: float = 0.0
    """The zero point, if no minimums are stored."""

    def fits(self, outputs: int, inputs: int) -> bool:
        """Return whether forward.c, which checks nothing, can read this as an (outputs, inputs) matrix of integers."""
        supported = (self.bits, self.group) in ((4, GROUP), (8, GROUP), (8, GROUP // 2))
        if not supported or inputs % GROUP or not (0 < self.unit < math.inf and 0 <= self.middle <= 255):
            return False
        groups = inputs // self.group
        group_bytes = self.group * self.bits // 8 + (2 if self.middle else 4)  # of one output
        shape = (-(-outputs // (2 * lanes())), groups, 2 * lanes() * group_bytes)
        return self.strips.dtype == np.uint8 and self.strips.shape == shape


@np.errstate(over="ignore", invalid="ignore")  # damaged weights may be infinite or NaN
def packed(weight: Array | Whole, kind: PackedKind) -> Packed:
    """Pack a weight (outputs, inputs) into strips."""
    outputs, floats = len(weight.step if isinstance(weight, Whole) else weight), _FLOATS.get(kind)
    if isinstance(weight, Whole):
        weight = weight.decoded().up_to(largest_byte())
        if weight.group != GROUP:
            weight = replace(weight, bits=8)
    unit, strips, bits, group = 1.0 if floats else _unit(weight), None, 0, GROUP
    for first in range(0, outputs, _AT_ONCE):
        part = weight[first : first + _AT_ONCE]
        if isinstance(part, np.ndarray) and floats:
            packed_part = _lines(part.astype(floats, copy=False)).view(floats)
        else:
            whole = part if isinstance(part, Whole) else quantized(part)
            packed_part, bits, group = _whole_strips(whole, unit), whole.bits, whole.group
        if strips is None:
            strips = empty((-(-outputs // (2 * lanes())), *packed_part.shape[1:]), packed_part.dtype)
        begin = first // (2 * lanes())
        strips[begin : begin + len(packed_part)] = packed_part
    assert strips is not None
    return Packed(strips, bits, group, unit, weight.middle if isinstance(weight, Whole) else 0.0)


def _unit(weight: Array | Whole) -> float:
    """Return a power of two such that no scale or minimum is more than 2^15 times it."""
    sizes = (weight.step, weight.least) if isinstance(weight, Whole) else (weight,)
    parts = (size[i : i + _AT_ONCE] for size in sizes if size is not None for i in range(0, len(size), _AT_ONCE))
    largest = max(float(np.abs(part.astype(np.float32, copy=False)).max()) for part in parts)
    return 2.0 ** (math.frexp(largest)[1] - 15) if 0 < largest < math.inf else 1.0


def joined(weights: Sequence[Array | Whole], interleaved: bool) -> Array | Whole:
    """Concatenate weights as `beside` does. Integers of several formats become one common format, rounded if needed."""
    if len(weights) == 1:
        return weights[0]
    arrays = [weight for weight in weights if isinstance(weight, np.ndarray)]
    if len(arrays) == len(weights):
        return beside(arrays, interleaved)
    whole = [
        weight.decoded().up_to(largest_byte()) if isinstance(weight, Whole) else quantized(weight) for weight in weights
    ]
    group = min(weight.group for weight in whole)
    parts = [(weight.numbers, *weight.scales(group)) for weight in whole]
    numbers, step, least = (beside(part, interleaved) for part in zip(*parts, strict=True))
    bits = max(weight.bits for weight in whole)
    zero_points = {weight.middle for weight in whole}
    if all(weight.least is None for weight in whole) and len(zero_points) == 1:
        return Whole(numbers, step, None, bits, zero_points.pop())
    return Whole(numbers, step, least, bits)


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


def _whole_strips(whole: Whole, unit: float) -> Array:
    """Pack integers into bytes (strips, groups, ...). Each group has lines as in `_lines`, then float16 scales.

    The scales and minimums are (2, 2, lanes); without minimums the scales are (2, lanes). With 4 bits, every second
    line is stored in the upper halves of the bytes of the line before it."""
    lines = _lines(whole.numbers)
    if whole.bits == 4:
        lines = lines[:, ::2] | lines[:, 1::2] << 4
    stored = [whole.step] if whole.least is None else [whole.step, whole.least]
    scales = _padded((np.stack(stored, -1) / np.float32(unit)).astype(np.float16))
    scales = scales.reshape(len(lines), 2, lanes(), -1, len(stored)).transpose(0, 3, 1, 4, 2)
    parts = [np.ascontiguousarray(part).view(np.uint8) for part in (lines, scales)]
    return np.concatenate([part.reshape(len(lines), whole.step.shape[1], -1) for part in parts], axis=2)


def quantized(weight: Array) -> Whole:
    """Quantize a weight (outputs, inputs) to integers from 0 to `largest_byte()`, by output and group of inputs."""
    groups = weight.astype(np.float32, copy=False).reshape(len(weight), -1, GROUP)
    minimum, maximum = groups.min(-1), groups.max(-1)
    scale = (maximum - minimum) / np.float32(largest_byte())
    numbers = np.rint((groups - minimum[..., None]) / np.maximum(scale, np.float32(1e-30))[..., None])
    return Whole(numbers.astype(np.uint8).reshape(weight.shape), scale, minimum)
