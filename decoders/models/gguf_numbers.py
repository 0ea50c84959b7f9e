"""The whole numbers in a GGUF file's tensors, as they stand there: numbers, and a step and a least for each group.

What the blocks of each format hold follows the GGUF format's reference (ggml's quantisation types); they are unpacked,
not computed with.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

_Blocks = np.ndarray[tuple[int, int], np.dtype[np.uint8]]
"""(blocks, bytes)."""
_Numbers = np.ndarray[tuple[int, ...], np.dtype[Any]]
_AT_ONCE = 2048
"""Outputs rounded at a time: that takes four times their size."""


@dataclass(frozen=True)
class Whole:
    """A weight as whole numbers: least + number * step, of its output and its group of inputs; without leasts
    (number - middle) * step."""

    numbers: Tensor
    """(outputs, inputs) bytes."""
    step: Tensor
    """(outputs, groups) float32."""
    least: Tensor | None
    bits: int = 8
    """4 where no number is over 15."""
    middle: float = 0.0

    @property
    def group(self) -> int:
        """Inputs of a group."""
        return self.numbers.shape[1] // self.step.shape[1]

    def each(self, change: Callable[[Tensor], Tensor]) -> Whole:
        """With numbers, steps and leasts changed alike, such as put in another order of outputs."""
        least = None if self.least is None else change(self.least)
        return replace(self, numbers=change(self.numbers), step=change(self.step), least=least)

    def __getitem__(self, outputs: slice) -> Whole:
        return self.each(lambda part: part[outputs])

    def floats(self) -> Tensor:
        """(outputs, inputs) float32."""
        step, least = self.scales(1)
        return self.numbers * step + least

    def scales(self, group: int) -> tuple[Tensor, Tensor]:
        """Steps and leasts for groups of so many inputs, a divisor of `group`."""
        least, times = -self.middle * self.step if self.least is None else self.least, self.group // group
        return self.step.repeat_interleave(times, 1), least.repeat_interleave(times, 1)

    def up_to(self, largest: int) -> Whole:
        """The same with no number over that: rounded, where one is."""
        if int(self.numbers.max()) <= largest:
            return self
        share = largest / 255
        few = [(part * share).round().to(torch.uint8) for part in torch.split(self.numbers, _AT_ONCE)]
        return replace(self, numbers=torch.cat(few), step=self.step / share, middle=self.middle * share)


def numbers_of(tensor: Any) -> Whole | None:
    """Those of a `gguf.ReaderTensor` of two dimensions; None for a format that is not unpacked here, as of floats."""
    unpack = _FORMATS.get(tensor.tensor_type.name)
    if unpack is None:
        return None
    size, bits, read = unpack
    numbers, step, least = read(np.asarray(tensor.data).reshape(-1, size))
    whole, steps = (torch.from_numpy(part.reshape(len(tensor.data), -1)) for part in (numbers, step))
    if isinstance(least, int):
        return Whole(whole, steps.float(), None, bits, least)
    return Whole(whole, steps.float(), torch.from_numpy(least.reshape(steps.shape)).float(), bits)


def _nibbles(packed: _Blocks, run: int) -> _Numbers:
    """Lower halves of each `run` bytes, then their upper halves."""
    return _shifted(packed, run, (0, 4), 15)


def _shifted(packed: _Blocks, run: int, shifts: tuple[int, ...], mask: int) -> _Numbers:
    """(blocks, numbers): of each `run` bytes what stands in them from these bits on, one after another."""
    cut = packed.reshape(len(packed), -1, 1, run) >> np.array(shifts, dtype=np.uint8)[:, None]
    return (cut & np.uint8(mask)).reshape(len(packed), -1)


def _half(blocks: _Blocks, place: int) -> _Numbers:
    """(blocks, 1) float32: the number of 16 bits that stands there."""
    return blocks[:, place : place + 2].copy().view(np.float16).astype(np.float32)


def _fifth_bits(blocks: _Blocks, place: int) -> _Numbers:
    """(blocks, 32): the bits of four bytes, each as 16 or 0."""
    return np.unpackbits(blocks[:, place : place + 4], axis=1, bitorder="little") << np.uint8(4)


def _steps_and_leasts(blocks: _Blocks) -> tuple[_Numbers, _Numbers]:
    """(blocks, 8) of each: from six bits, which take 12 bytes together, times a step of their own."""
    low, middle, high = (blocks[:, place : place + 4] for place in (4, 8, 12))
    steps = np.concatenate([low & 63, (high & 15) | (low >> 2 & 48)], axis=1)
    leasts = np.concatenate([middle & 63, high >> 4 | (middle >> 2 & 48)], axis=1)
    return _half(blocks, 0) * steps, -_half(blocks, 2) * leasts


def _q6_k(blocks: _Blocks) -> tuple[_Numbers, _Numbers, int]:
    numbers = _nibbles(blocks[:, :128], 64) | _shifted(blocks[:, 128:192], 32, (0, 2, 4, 6), 3) << np.uint8(4)
    return numbers, _half(blocks, 208) * blocks[:, 192:208].view(np.int8), 32


def _q5_k(blocks: _Blocks) -> tuple[_Numbers, _Numbers, _Numbers]:
    fifth = _shifted(blocks[:, 16:48], 32, tuple(range(8)), 1) << np.uint8(4)
    return _nibbles(blocks[:, 48:], 32) | fifth, *_steps_and_leasts(blocks)


_FORMATS: dict[str, tuple[int, int, Callable[[_Blocks], tuple[_Numbers, _Numbers, _Numbers | int]]]] = {
    "Q4_0": (18, 4, lambda b: (_nibbles(b[:, 2:], 16), _half(b, 0), 8)),
    "Q4_1": (20, 4, lambda b: (_nibbles(b[:, 4:], 16), _half(b, 0), _half(b, 2))),
    "Q5_0": (22, 8, lambda b: (_nibbles(b[:, 6:], 16) | _fifth_bits(b, 2), _half(b, 0), 16)),
    "Q5_1": (24, 8, lambda b: (_nibbles(b[:, 8:], 16) | _fifth_bits(b, 4), _half(b, 0), _half(b, 2))),
    "Q8_0": (34, 8, lambda b: (b[:, 2:] ^ np.uint8(128), _half(b, 0), 128)),
    "Q4_K": (144, 4, lambda b: (_nibbles(b[:, 16:], 32), *_steps_and_leasts(b))),
    "Q5_K": (176, 8, _q5_k),
    "Q6_K": (210, 8, _q6_k),
}
"""By name: bytes of a block, bits kept of a number, and what gives numbers, steps and leasts, (blocks, …) each; or the
number that stands for 0 in place of leasts."""
