"""Linear layers' weights as forward.c reads them: strips of outputs, in the order in which they are multiplied.

Weights that are packed and that nobody else reads are given up: the layer keeps their shape and first numbers.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor, nn

from tot.decoders.errors import ModelError
from tot.decoders.kernels.native import lanes, largest_byte, log_once
from tot.decoders.memory import free_memory

Weights = Literal["float32", "bfloat16", "int8", "int8-dynamic"]
GROUP = 32
"""Inputs that share a step in int8: GROUP in forward.c."""
_JOINED: dict[Weights, int] = {"float32": 1, "bfloat16": 2, "int8": 2, "int8-dynamic": 4}
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


def packed(weight: Tensor, kind: Weights) -> Tensor:
    """(outputs, inputs) -> strips, the first dimension."""
    strips = None
    for first in range(0, len(weight), _AT_ONCE):
        part = weight[first : first + _AT_ONCE]
        if kind in ("int8", "int8-dynamic"):
            whole, scales = quantized(part, largest_byte() if kind == "int8-dynamic" else 255)
            made = _strips(whole, _JOINED[kind], scales)
        else:
            made = _strips(part.to(getattr(torch, kind)), _JOINED[kind])
        if strips is None:
            strips = made.new_empty((-(-len(weight) // (2 * lanes())), *made.shape[1:]))
        begin = first // (2 * lanes())
        strips[begin : begin + len(made)] = made
    assert strips is not None
    return strips


def give_up(layer: nn.Linear) -> None:
    """Let go of a layer's weight; only its packed copy computes from now on."""
    first = first_numbers(layer.weight).clone()
    layer.weight = nn.Parameter(torch.empty_like(layer.weight, device="meta"), requires_grad=False)
    layer.weight.first_numbers = first  # type: ignore[attr-defined]
    layer.forward = _refuse  # type: ignore[method-assign]


def first_numbers(weight: Tensor) -> Tensor:
    """(64,) or fewer of a weight's numbers, also of one that was given up: they tell one model from another."""
    first: Tensor = getattr(weight, "first_numbers", weight.detach().flatten()[:64])
    return first


def copy_the_rest(model: nn.Module) -> None:
    """Copy what no linear layer gives up: a file's weights are pages of one mapping, held as long as any of them is."""
    for module in model.modules():
        for name, tensor in [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]:
            if not (isinstance(module, nn.Linear) and name == "weight"):
                tensor.data = tensor.data.clone()


def _refuse(input: Tensor) -> Tensor:
    raise ModelError(
        "this model's weights are held only as the engine that loaded it has packed them: load the model again by "
        "load_model(...), or give that model to the engine"
    )


def joined(tensors: Sequence[Tensor], interleaved: bool) -> Tensor:
    """One below the other; or interleaved, so many outputs of each in turn as a line has."""
    if not interleaved:
        return tensors[0] if len(tensors) == 1 else torch.cat(list(tensors))
    return torch.stack([tensor.reshape(-1, lanes(), *tensor.shape[1:]) for tensor in tensors], dim=1).flatten(0, 2)


def _strips(weight: Tensor, joined: int, scales: Tensor | None = None) -> Tensor:
    """(outputs, inputs) -> (strips, inputs / joined, 2, lanes, joined), outputs padded with zeros. With scales
    (outputs, groups, 2): bytes (strips, groups, ...), of each group such lines and then (2, 2, lanes) float32."""
    missing = -weight.shape[0] % (2 * lanes())
    weight = nn.functional.pad(weight, (0, 0, 0, missing))
    cut = weight.reshape(-1, 2, lanes(), weight.shape[1] // joined, joined).permute(0, 3, 1, 2, 4)
    if scales is None:
        return cut.contiguous()
    scales = nn.functional.pad(scales, (0, 0, 0, 0, 0, missing)).reshape(len(cut), 2, lanes(), -1, 2)
    beside = scales.permute(0, 3, 1, 4, 2).contiguous().flatten(2).view(torch.uint8)
    return torch.cat([cut.reshape(len(cut), beside.shape[1], -1), beside], dim=2)


def quantized(weight: Tensor, largest: int = 255) -> tuple[Tensor, Tensor]:
    """A weight (outputs, inputs) as whole numbers up to `largest`, and (outputs, groups, 2) steps and least weights.

    A weight is least + number * step of its output and group of inputs, of which the least weight is 0 and the largest
    `largest`: a multiple of 15, so that what was in four bits with a least and a step for each such group before (Q4_1)
    is met exactly.
    """
    groups = weight.float().reshape(len(weight), -1, GROUP)
    least, most = groups.amin(-1), groups.amax(-1)
    step = (most - least) / largest
    whole = ((groups - least[..., None]) / step.clamp_min(1e-30)[..., None]).round().to(torch.uint8)
    return whole.flatten(1), torch.stack([step, least], -1)
