"""The quantized integers of a GGUF file's tensors, with a scale and a minimum for each group.

Block layouts follow the reference of the GGUF format (ggml's quantization types). Blocks are unpacked, not dequantized.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from tot.decoders.models.shapes import Array

_Blocks = np.ndarray[tuple[int, int], np.dtype[np.uint8]]
"""(blocks, bytes)"""
_AT_ONCE = 256
"""Outputs unpacked at a time, so that temporary arrays are small enough for the caches."""


@dataclass(frozen=True)
class QuantizedMatrix:
    """A weight as integers, with a scale for each output and group of inputs.

    A weight is integer * scale + minimum; without minimums (integer - zero_point) * scale; with a codebook
    codebook[integer] * scale.
    """

    integers: Array
    """(outputs, inputs), uint8."""
    scales: Array
    """(outputs, groups), float32."""
    minimums: Array | None
    """(outputs, groups), float32."""
    bits: int = 8
    """4 if no integer is above 15."""
    zero_point: float = 0.0
    codebook: Array | None = None
    """The 16 values of a format with 4 bits, such as IQ4_NL, which has no minimums and no zero point."""

    @property
    def group(self) -> int:
        """Number of inputs in a group."""
        return int(self.integers.shape[1] // self.scales.shape[1])

    def map(self, change: Callable[[Array], Array]) -> QuantizedMatrix:
        """Apply a function to the integers, scales and minimums, such as a permutation of the outputs."""
        minimums = None if self.minimums is None else change(self.minimums)
        return replace(self, integers=change(self.integers), scales=change(self.scales), minimums=minimums)

    def __len__(self) -> int:
        return len(self.scales)

    def __getitem__(self, outputs: slice) -> QuantizedMatrix:
        return self.map(lambda part: part[outputs])

    def with_minimums(self, group: int) -> QuantizedMatrix:
        """Return the same weight with minimums and groups of `group` inputs, a divisor of `self.group`."""
        matrix = self.decoded()
        minimums = matrix.minimums
        if minimums is None:
            minimums = np.float32(-matrix.zero_point) * matrix.scales
        scales, minimums = (values.repeat(self.group // group, axis=1) for values in (matrix.scales, minimums))
        return QuantizedMatrix(matrix.integers, scales, minimums, matrix.bits)

    def levels(self) -> tuple[Array, int]:
        """Return the values of the codebook as integers without sign, and their zero point."""
        assert self.codebook is not None
        zero_point = max(1, -int(self.codebook.min()))
        return (self.codebook.astype(np.int16) + zero_point).astype(np.uint8), zero_point

    def decoded(self) -> QuantizedMatrix:
        """Return the same weight without a codebook."""
        if self.codebook is None:
            return self
        levels, zero_point = self.levels()
        return replace(self, integers=levels[self.integers], bits=8, zero_point=zero_point, codebook=None)


def unpack(tensor: Any) -> QuantizedMatrix | None:
    """Unpack a matrix (`GGUFTensor`), or the matrices of all experts one below the other.

    Returns None for a matrix of floats."""
    form = FORMATS.get(tensor.tensor_type.name)
    if form is None:
        return None
    rows = tensor.data.reshape(-1, tensor.data.shape[-1])
    unpacked: list[Array] = []
    for first in range(0, len(rows), _AT_ONCE):
        part = rows[first : first + _AT_ONCE]
        for i, values in enumerate(form.unpack(part.reshape(-1, form.size))):
            values = values.reshape(len(part), -1)
            if not first:
                unpacked.append(np.empty((len(rows), values.shape[1]), values.dtype))
            unpacked[i][first : first + len(part)] = values
    integers, scales, *minimums = unpacked
    return QuantizedMatrix(
        integers, scales, minimums[0] if minimums else None, form.bits, form.zero_point, form.codebook
    )


def _nibbles(packed: _Blocks, run: int) -> Array:
    """Unpack the lower nibbles of each `run` bytes, then their upper nibbles."""
    return _shifted(packed, run, (0, 4), 15)


def _shifted(packed: _Blocks, run: int, shifts: tuple[int, ...], mask: int) -> Array:
    """Unpack the bits `mask` of each `run` bytes, shifted right by each of `shifts` in turn, to (blocks, numbers)."""
    runs = packed.reshape(len(packed), -1, run)
    shifted = np.empty((*runs.shape[:2], len(shifts), run), np.uint8)
    for i, shift in enumerate(shifts):
        np.right_shift(runs, shift, out=shifted[:, :, i])
    shifted &= np.uint8(mask)
    return shifted.reshape(len(packed), -1)


def _half(blocks: _Blocks, offset: int) -> Array:
    """Read the float16 at a byte offset of each block, as (blocks, 1) float32."""
    return blocks[:, offset : offset + 2].copy().view(np.float16).astype(np.float32)


def _fifth_bits(blocks: _Blocks, offset: int) -> Array:
    """Unpack the bits of four bytes to (blocks, 32), each as 16 or 0."""
    return np.unpackbits(blocks[:, offset : offset + 4], axis=1, bitorder="little") << np.uint8(4)


def _scales_and_minimums(blocks: _Blocks) -> tuple[Array, Array]:
    """Unpack (blocks, 8) scales and minimums: 6-bit numbers in 12 bytes, times a float16 scale for each of the two."""
    low, middle, high = (blocks[:, offset : offset + 4] for offset in (4, 8, 12))
    scales = np.concatenate([low & 63, (high & 15) | (low >> 2 & 48)], axis=1)
    minimums = np.concatenate([middle & 63, high >> 4 | (middle >> 2 & 48)], axis=1)
    return _half(blocks, 0) * scales, -_half(blocks, 2) * minimums


def _signed(low: Array, high: Array) -> Array:
    """Join the four lower and two upper bits of scales, stored with a zero point of 32."""
    scales: Array = (low | high << np.uint8(4)).astype(np.float32) - np.float32(32)
    return scales


def _q2_k(blocks: _Blocks) -> tuple[Array, Array, Array]:
    scales = blocks[:, :16]
    numbers = _shifted(blocks[:, 16:80], 32, (0, 2, 4, 6), 3)
    return numbers, _half(blocks, 80) * (scales & 15), -_half(blocks, 82) * (scales >> 4)


def _q3_k(blocks: _Blocks) -> tuple[Array, Array]:
    third = _shifted(blocks[:, :32], 32, tuple(range(8)), 1) << np.uint8(2)
    scales = _signed(_nibbles(blocks[:, 96:104], 8), _shifted(blocks[:, 104:108], 4, (0, 2, 4, 6), 3))
    return _shifted(blocks[:, 32:96], 32, (0, 2, 4, 6), 3) | third, _half(blocks, 108) * scales


def _q5_k(blocks: _Blocks) -> tuple[Array, Array, Array]:
    fifth = _shifted(blocks[:, 16:48], 32, tuple(range(8)), 1) << np.uint8(4)
    return _nibbles(blocks[:, 48:], 32) | fifth, *_scales_and_minimums(blocks)


def _q6_k(blocks: _Blocks) -> tuple[Array, Array]:
    numbers = _nibbles(blocks[:, :128], 64) | _shifted(blocks[:, 128:192], 32, (0, 2, 4, 6), 3) << np.uint8(4)
    return numbers, _half(blocks, 208) * blocks[:, 192:208].view(np.int8)


def _iq4_xs(blocks: _Blocks) -> tuple[Array, Array]:
    scales = _signed(_nibbles(blocks[:, 4:8], 1), _shifted(blocks[:, 2:4], 1, (0, 2, 4, 6), 3))
    return _nibbles(blocks[:, 8:], 16), _half(blocks, 0) * scales


def _mxfp4(blocks: _Blocks) -> tuple[Array, Array]:
    """The values of _E2M1 are doubled, so the scale is half the power of two of the format."""
    return _nibbles(blocks[:, 1:], 16), np.ldexp(np.float32(1), blocks[:, :1].astype(np.int32) - 128)


@dataclass(frozen=True)
class _Format:
    """A quantization type of GGUF."""

    size: int
    """Bytes of a block."""
    bits: int
    """Bits of an unpacked integer."""
    unpack: Callable[[_Blocks], tuple[Array, ...]]
    """Unpack the integers and scales of blocks, and the minimums if the format has them, each (blocks, ...)."""
    zero_point: int = 0
    codebook: Array | None = None


_E2M1 = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], dtype=np.int8)
"""Twice the values of a 4-bit float (OCP Microscaling Formats, section 5.3.3)."""
_NON_LINEAR = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], dtype=np.int8)
"""The values of IQ4_NL and IQ4_XS."""

FORMATS: dict[str, _Format] = {
    "Q4_0": _Format(18, 4, lambda b: (_nibbles(b[:, 2:], 16), _half(b, 0)), 8),
    "Q4_1": _Format(20, 4, lambda b: (_nibbles(b[:, 4:], 16), _half(b, 0), _half(b, 2))),
    "Q5_0": _Format(22, 8, lambda b: (_nibbles(b[:, 6:], 16) | _fifth_bits(b, 2), _half(b, 0)), 16),
    "Q5_1": _Format(24, 8, lambda b: (_nibbles(b[:, 8:], 16) | _fifth_bits(b, 4), _half(b, 0), _half(b, 2))),
    "Q8_0": _Format(34, 8, lambda b: (b[:, 2:] ^ np.uint8(128), _half(b, 0)), 128),
    "Q2_K": _Format(84, 4, _q2_k),
    "Q3_K": _Format(110, 4, _q3_k, 4),
    "Q4_K": _Format(144, 4, lambda b: (_nibbles(b[:, 16:], 32), *_scales_and_minimums(b))),
    "Q5_K": _Format(176, 8, _q5_k),
    "Q6_K": _Format(210, 8, _q6_k, 32),
    "IQ4_NL": _Format(18, 4, lambda b: (_nibbles(b[:, 2:], 16), _half(b, 0)), codebook=_NON_LINEAR),
    "IQ4_XS": _Format(136, 4, _iq4_xs, codebook=_NON_LINEAR),
    "MXFP4": _Format(17, 4, _mxfp4, codebook=_E2M1),
}
"""By the name of the type in `gguf.GGMLQuantizationType`."""
FLOATS = ("F32", "F16", "BF16")
"""The other types of readable tensors."""
