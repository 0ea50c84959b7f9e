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


@dataclass(frozen=True)
class Whole:
    """A weight as integers: least + number * step, with a scale (`step`) and a minimum (`least`) for each output and
    group of inputs. Without minimums: (number - middle) * step, where `middle` is the zero point."""

    numbers: Array
    """(outputs, inputs), uint8."""
    step: Array
    """(outputs, groups), float32."""
    least: Array | None
    bits: int = 8
    """4 if no number is above 15."""
    middle: float = 0.0

    @property
    def group(self) -> int:
        """Number of inputs in a group."""
        return int(self.numbers.shape[1] // self.step.shape[1])

    def each(self, change: Callable[[Array], Array]) -> Whole:
        """Apply a function to the numbers, scales and minimums, such as a permutation of the outputs."""
        least = None if self.least is None else change(self.least)
        return replace(self, numbers=change(self.numbers), step=change(self.step), least=least)

    def __getitem__(self, outputs: slice) -> Whole:
        return self.each(lambda part: part[outputs])

    def floats(self) -> Array:
        """Dequantize to (outputs, inputs), float32."""
        step, least = self.scales(1)
        return self.numbers * step + least

    def scales(self, group: int) -> tuple[Array, Array]:
        """Return the scales and minimums for groups of `group` inputs, a divisor of `self.group`."""
        least = np.float32(-self.middle) * self.step if self.least is None else self.least
        repeats = self.group // group
        return self.step.repeat(repeats, axis=1), least.repeat(repeats, axis=1)

    def up_to(self, largest: int) -> Whole:
        """Return the weight with all numbers at most `largest`, rescaled and rounded if one is above it."""
        if int(self.numbers.max()) <= largest:
            return self
        ratio = largest / 255
        rounded = np.rint(np.arange(256) * ratio).astype(np.uint8)
        step = self.step / np.float32(ratio)
        return replace(self, numbers=rounded[self.numbers], step=step, middle=self.middle * ratio)


def numbers_of(tensor: Any) -> Whole | None:
    """Unpack a 2-D `gguf.ReaderTensor`. Returns None for other formats, such as floats."""
    unpack = _FORMATS.get(tensor.tensor_type.name)
    if unpack is None:
        return None
    size, bits, read = unpack
    numbers, step, least = read(np.asarray(tensor.data).reshape(-1, size))
    numbers, step = (part.reshape(len(tensor.data), -1) for part in (numbers, step))
    if isinstance(least, int):
        return Whole(numbers, step, None, bits, least)
    return Whole(numbers, step, least.reshape(step.shape), bits)


def _nibbles(packed: _Blocks, run: int) -> Array:
    """Unpack the lower nibbles of each `run` bytes, then their upper nibbles."""
    return _shifted(packed, run, (0, 4), 15)


def _shifted(packed: _Blocks, run: int, shifts: tuple[int, ...], mask: int) -> Array:
    """Unpack the bits `mask` of each `run` bytes, shifted right by each of `shifts` in turn, to (blocks, numbers)."""
    shifted = packed.reshape(len(packed), -1, 1, run) >> np.array(shifts, dtype=np.uint8)[:, None]
    return (shifted & np.uint8(mask)).reshape(len(packed), -1)


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


def _q6_k(blocks: _Blocks) -> tuple[Array, Array, int]:
    numbers = _nibbles(blocks[:, :128], 64) | _shifted(blocks[:, 128:192], 32, (0, 2, 4, 6), 3) << np.uint8(4)
    return numbers, _half(blocks, 208) * blocks[:, 192:208].view(np.int8), 32


def _q5_k(blocks: _Blocks) -> tuple[Array, Array, Array]:
    fifth = _shifted(blocks[:, 16:48], 32, tuple(range(8)), 1) << np.uint8(4)
    return _nibbles(blocks[:, 48:], 32) | fifth, *_scales_and_minimums(blocks)


_FORMATS: dict[str, tuple[int, int, Callable[[_Blocks], tuple[Array, Array, Array | int]]]] = {
    "Q4_0": (18, 4, lambda b: (_nibbles(b[:, 2:], 16), _half(b, 0), 8)),
    "Q4_1": (20, 4, lambda b: (_nibbles(b[:, 4:], 16), _half(b, 0), _half(b, 2))),
    "Q5_0": (22, 8, lambda b: (_nibbles(b[:, 6:], 16) | _fifth_bits(b, 2), _half(b, 0), 16)),
    "Q5_1": (24, 8, lambda b: (_nibbles(b[:, 8:], 16) | _fifth_bits(b, 4), _half(b, 0), _half(b, 2))),
    "Q8_0": (34, 8, lambda b: (b[:, 2:] ^ np.uint8(128), _half(b, 0), 128)),
    "Q4_K": (144, 4, lambda b: (_nibbles(b[:, 16:], 32), *_scales_and_minimums(b))),
    "Q5_K": (176, 8, _q5_k),
    "Q6_K": (210, 8, _q6_k),
}
"""By name of the format: bytes of a block, bits of an unpacked number, and a function that unpacks the numbers, scales
and minimums, each (blocks, ...). It returns the zero point instead of minimums if the format has none."""
