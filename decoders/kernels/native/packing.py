"""Packing of the weights of linear layers for forward.c: strips of outputs, in the order of multiplication."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from tot.decoders.kernels.native.library import lanes, log_once
from tot.decoders.machine import free_memory
from tot.decoders.models.gguf_numbers import Whole

PackedKind = Literal["float32", "bfloat16", "int8-dynamic", "gguf"]
GROUP = 32
"""Inputs that share a scale: GROUP in linear.h."""
_JOINED: dict[PackedKind, int] = {"float32": 1, "bfloat16": 2, "int8-dynamic": 4, "gguf": 4}
"""Adjacent inputs of one output in a line. A line has one output per vector lane; a strip has two lines."""
_AT_ONCE = 2048
"""Outputs packed at a time: temporary memory is several float32 copies of them."""


def room_for(what: str, needed: float, device: torch.device) -> bool:
    """Return whether `needed` bytes are free to pack `what`. If not, log it once."""
    free = free_memory(device)
    if needed > free:
        sizes = f"{needed / 2**30:.1f} GiB, and {free / 2**30:.1f} are free"
        log_once(logging.WARNING, f"decoding is slower, as packing {what} needs {sizes}: free memory to decode faster")
    return needed <= free


class Packed(NamedTuple):
    """A packed weight matrix."""

    strips: Tensor
    """Strips of outputs in the first dimension."""
    bits: int = 0
    """Bits of an integer; 0 for floats. The fields below are for integers, too."""
    group: int = GROUP
    """Inputs that share a scale."""
    unit: float = 1.0
    """Unit of scales (`step`) and minimums (`least`): as float16 multiples of it they keep their precision."""
    middle: float = 0.0
    """The zero point, if no minimums are stored."""
    largest: int = 255
    """The largest integer, after the codebook."""
    codebook: Sequence[int] = ()
    """The integers that 4-bit numbers stand for, from 0 to 255; empty if a number stands for itself."""

    def fits(self, outputs: int, inputs: int) -> bool:
        """Return whether forward.c, which checks nothing, can read this as an (outputs, inputs) matrix of integers."""
        coded = (self.bits, self.group, len(self.codebook)) == (4, GROUP, 16) and self.middle > 0
        supported = coded or (self.bits in (4, 8) and self.group in (GROUP, GROUP // 2) and not self.codebook)
        if not supported or inputs % GROUP or not (0 < self.unit < math.inf and 0 <= self.middle <= 255):
            return False
        most = 15 if self.bits == 4 and not self.codebook else 255
        if not 0 <= self.largest <= most or any(not 0 <= number <= self.largest for number in self.codebook):
            return False
        groups = inputs // self.group
        group_bytes = self.group * self.bits // 8 + (2 if self.middle else 4)  # of one output
        shape = (-(-outputs // (2 * lanes())), groups, 2 * lanes() * group_bytes)
        return self.strips.dtype == torch.uint8 and self.strips.shape == shape


def packed(weight: Tensor | Whole, kind: PackedKind) -> Packed:
    """Pack a weight (outputs, inputs) into strips."""
    outputs = len(weight.step if isinstance(weight, Whole) else weight)
    floats = kind in ("float32", "bfloat16")
    middle, largest, codebook = 0.0, 255, []
    if isinstance(weight, Whole):
        middle, largest = weight.middle, int(weight.numbers.max())
        if weight.codebook is not None:
            levels, middle = weight.levels()
            largest, codebook = int(levels.max()), levels.tolist()
    unit, strips, bits, group = 1.0 if floats else _unit(weight), None, 0, GROUP
    for first in range(0, outputs, _AT_ONCE):
        part = weight[first : first + _AT_ONCE]
        if isinstance(part, Tensor) and floats:
            packed_part = _strips(part.to(getattr(torch, kind)), _JOINED[kind])
        else:
            whole = part if isinstance(part, Whole) else quantized(part)
            packed_part, bits, group = _whole_strips(whole, _JOINED[kind], unit), whole.bits, whole.group
        if strips is None:
            strips = packed_part.new_empty((-(-outputs // (2 * lanes())), *packed_part.shape[1:]))
        begin = first // (2 * lanes())
        strips[begin : begin + len(packed_part)] = packed_part
    assert strips is not None
    return Packed(strips, bits, group, unit, middle, largest, codebook)


def _unit(weight: Tensor | Whole) -> float:
    """Return a power of two such that no scale or minimum is more than 2^15 times it."""
    sizes = (weight.step, weight.least) if isinstance(weight, Whole) else (weight,)
    largest = max(abs(float(end)) for size in sizes if size is not None for end in torch.aminmax(size))
    return 2.0 ** (math.frexp(largest)[1] - 15) if 0 < largest < math.inf else 1.0


def joined(weights: Sequence[Tensor | Whole], interleaved: bool) -> Tensor | Whole:
    """Concatenate weights as `beside` does. Integers of several formats become one common format."""
    if len(weights) == 1:
        return weights[0]
    tensors = [weight for weight in weights if isinstance(weight, Tensor)]
    if len(tensors) == len(weights):
        return beside(tensors, interleaved)
    whole = [weight if isinstance(weight, Whole) else quantized(weight) for weight in weights]
    if len({weight.codebook if weight.codebook is None else weight.codebook.tobytes() for weight in whole}) > 1:
        whole = [weight.decoded() for weight in whole]
    group = min(weight.group for weight in whole)
    parts = [(weight.numbers, *weight.scales(group)) for weight in whole]
    numbers, step, least = (beside(part, interleaved) for part in zip(*parts, strict=True))
    bits, zero_points = max(weight.bits for weight in whole), {weight.middle for weight in whole}
    if all(weight.least is None for weight in whole) and len(zero_points) == 1:
        return Whole(numbers, step, None, bits, zero_points.pop(), whole[0].codebook)
    return Whole(numbers, step, least, bits)


def beside(tensors: Sequence[Tensor], interleaved: bool) -> Tensor:
    """Concatenate the outputs of tensors. If `interleaved`, take one line of outputs of each in turn."""
    if not interleaved:
        return tensors[0] if len(tensors) == 1 else torch.cat(list(tensors))
    return torch.stack([tensor.reshape(-1, lanes(), *tensor.shape[1:]) for tensor in tensors], dim=1).flatten(0, 2)


def _strips(weight: Tensor, joined: int) -> Tensor:
    """Pack (outputs, inputs) into (strips, inputs / joined, 2, lanes, joined), outputs padded with zeros."""
    weight = nn.functional.pad(weight, (0, 0, 0, -weight.shape[0] % (2 * lanes())))
    return weight.reshape(-1, 2, lanes(), weight.shape[1] // joined, joined).permute(0, 3, 1, 2, 4).contiguous()


def _whole_strips(whole: Whole, joined: int, unit: float) -> Tensor:
    """Pack integers into bytes (strips, groups, ...). Each group has lines as in `_strips`, then float16 scales.

    The scales and minimums are (2, 2, lanes); without minimums the scales are (2, lanes). With 4 bits, every second
    line is stored in the upper halves of the bytes of the line before it."""
    lines = _strips(whole.numbers, joined)
    if whole.bits == 4:
        lines = lines[:, ::2] | lines[:, 1::2] << 4
    stored = [whole.step] if whole.least is None else [whole.step, whole.least]
    scales = torch.stack(stored, -1) / unit
    scales = nn.functional.pad(scales.half(), (0, 0, 0, 0, 0, -len(scales) % (2 * lanes())))
    by_group = scales.reshape(len(lines), 2, lanes(), -1, len(stored)).permute(0, 3, 1, 4, 2).contiguous().flatten(2)
    return torch.cat([lines.reshape(*by_group.shape[:2], -1), by_group.view(torch.uint8)], dim=2)


def quantized(weight: Tensor) -> Whole:
    """Quantize a weight (outputs, inputs) to integers from 0 to 255, by output and group of inputs."""
    groups = weight.float().reshape(len(weight), -1, GROUP)
    minimum, maximum = groups.amin(-1), groups.amax(-1)
    scale = (maximum - minimum) / 255
    integers = ((groups - minimum[..., None]) / scale.clamp_min(1e-30)[..., None]).round().to(torch.uint8)
    return Whole(integers.flatten(1), scale, minimum)
