"""Linear layers' weights as forward.c reads them: strips of outputs, in the order in which they are multiplied."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from tot.decoders.kernels.native.library import lanes, largest_byte, log_once
from tot.decoders.machine import free_memory
from tot.decoders.models.gguf_numbers import Whole

PackedKind = Literal["float32", "bfloat16", "int8-dynamic", "gguf"]
GROUP = 32
"""Inputs that share a step: GROUP in forward.c."""
_JOINED: dict[PackedKind, int] = {"float32": 1, "bfloat16": 2, "int8-dynamic": 4, "gguf": 4}
"""Inputs of one output beside each other in a line, which is of as many outputs as vectors have lanes; two are a strip.
"""
_AT_ONCE = 2048
"""Outputs packed at a time: what that takes beside its result is float32, several times over."""


def room_for(what: str, needed: float, device: torch.device) -> bool:
    """Whether so many bytes are free to pack something; where they are not, that is logged once."""
    free = free_memory(device)
    if needed > free:
        sizes = f"{needed / 2**30:.1f} GiB free, and there are {free / 2**30:.1f}"
        log_once(logging.WARNING, f"decoding is slower, as to pack {what} takes {sizes}: free some to decode faster")
    return needed <= free


class Packed(NamedTuple):
    """A weight as it is read."""

    strips: Tensor
    """Of outputs, the first dimension."""
    bits: int = 0
    """Of each whole number; 0 of floats. What follows is of whole numbers, too."""
    group: int = GROUP
    """Inputs that share a step."""
    unit: float = 1.0
    """What steps and leasts are multiples of: kept in 16 bits, they are large enough not to lose any."""
    middle: float = 0.0
    """The number that stands for 0, where leasts are not kept."""

    def fits(self, outputs: int, inputs: int) -> bool:
        """Whether forward.c can read this as a matrix of (outputs, inputs) whole numbers: it trusts these numbers."""
        known = (self.bits, self.group) in ((4, GROUP), (8, GROUP), (8, GROUP // 2))
        if not known or inputs % GROUP or not (0 < self.unit < math.inf and 0 <= self.middle <= 255):
            return False
        groups = inputs // self.group
        group_bytes = self.group * self.bits // 8 + (2 if self.middle else 4)  # of one output
        shape = (-(-outputs // (2 * lanes())), groups, 2 * lanes() * group_bytes)
        return self.strips.dtype == torch.uint8 and self.strips.shape == shape


def packed(weight: Tensor | Whole, kind: PackedKind) -> Packed:
    """(outputs, inputs) -> strips."""
    outputs = len(weight.step if isinstance(weight, Whole) else weight)
    floats = kind in ("float32", "bfloat16")
    if isinstance(weight, Whole):
        weight = weight.up_to(largest_byte())
    unit, strips, bits, group = 1.0 if floats else _unit(weight), None, 0, GROUP
    for first in range(0, outputs, _AT_ONCE):
        part = weight[first : first + _AT_ONCE]
        if isinstance(part, Tensor) and floats:
            made = _strips(part.to(getattr(torch, kind)), _JOINED[kind])
        else:
            whole = part if isinstance(part, Whole) else quantized(part)
            made, bits, group = _whole_strips(whole, _JOINED[kind], unit), whole.bits, whole.group
        if strips is None:
            strips = made.new_empty((-(-outputs // (2 * lanes())), *made.shape[1:]))
        begin = first // (2 * lanes())
        strips[begin : begin + len(made)] = made
    assert strips is not None
    return Packed(strips, bits, group, unit, weight.middle if isinstance(weight, Whole) else 0.0)


def _unit(weight: Tensor | Whole) -> float:
    """A power of two, so that no step or least is more than 2^15 of them."""
    sizes = (weight.step, weight.least) if isinstance(weight, Whole) else (weight,)
    most = max(abs(float(end)) for size in sizes if size is not None for end in torch.aminmax(size))
    return 2.0 ** (math.frexp(most)[1] - 15) if 0 < most < math.inf else 1.0


def joined(weights: Sequence[Tensor | Whole], interleaved: bool) -> Tensor | Whole:
    """As `beside` does; whole numbers of several formats in one that holds them all, each rounded before if need be."""
    if len(weights) == 1:
        return weights[0]
    tensors = [weight for weight in weights if isinstance(weight, Tensor)]
    if len(tensors) == len(weights):
        return beside(tensors, interleaved)
    whole = [weight.up_to(largest_byte()) if isinstance(weight, Whole) else quantized(weight) for weight in weights]
    group = min(weight.group for weight in whole)
    parts = [(one.numbers, *one.scales(group)) for one in whole]
    numbers, step, least = (beside(part, interleaved) for part in zip(*parts, strict=True))
    bits, middles = max(one.bits for one in whole), {one.middle for one in whole}
    if all(one.least is None for one in whole) and len(middles) == 1:
        return Whole(numbers, step, None, bits, *middles)
    return Whole(numbers, step, least, bits)


def beside(tensors: Sequence[Tensor], interleaved: bool) -> Tensor:
    """One below the other; or interleaved, so many outputs of each in turn as a line has."""
    if not interleaved:
        return tensors[0] if len(tensors) == 1 else torch.cat(list(tensors))
    return torch.stack([tensor.reshape(-1, lanes(), *tensor.shape[1:]) for tensor in tensors], dim=1).flatten(0, 2)


def _strips(weight: Tensor, joined: int) -> Tensor:
    """(outputs, inputs) -> (strips, inputs / joined, 2, lanes, joined), outputs padded with zeros."""
    weight = nn.functional.pad(weight, (0, 0, 0, -weight.shape[0] % (2 * lanes())))
    return weight.reshape(-1, 2, lanes(), weight.shape[1] // joined, joined).permute(0, 3, 1, 2, 4).contiguous()


def _whole_strips(whole: Whole, joined: int, unit: float) -> Tensor:
    """-> bytes (strips, groups, ...), of each group lines as above and then (2, 2, lanes) numbers of 16 bits, without
    leasts (2, lanes). Of four bits every second line stands in the upper halves of the bytes of the one before."""
    lines = _strips(whole.numbers, joined)
    if whole.bits == 4:
        lines = lines[:, ::2] | lines[:, 1::2] << 4
    kept = [whole.step] if whole.least is None else [whole.step, whole.least]
    scales = torch.stack(kept, -1) / unit
    scales = nn.functional.pad(scales.half(), (0, 0, 0, 0, 0, -len(scales) % (2 * lanes())))
    beside = scales.reshape(len(lines), 2, lanes(), -1, len(kept)).permute(0, 3, 1, 4, 2).contiguous().flatten(2)
    return torch.cat([lines.reshape(*beside.shape[:2], -1), beside.view(torch.uint8)], dim=2)


def quantized(weight: Tensor) -> Whole:
    """A weight (outputs, inputs) as whole numbers: of its output and group of inputs the least is 0, and the largest is
    the largest that can be multiplied."""
    groups = weight.float().reshape(len(weight), -1, GROUP)
    least, most = groups.amin(-1), groups.amax(-1)
    step = (most - least) / largest_byte()
    whole = ((groups - least[..., None]) / step.clamp_min(1e-30)[..., None]).round().to(torch.uint8)
    return Whole(whole.flatten(1), step, least)
