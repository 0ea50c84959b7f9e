"""Linear layers in bfloat16 on the CPU, their weights packed once the way oneDNN's kernels read them.

Unpacked, every call reads a weight that has to be rearranged: with few rows that takes as long as the product itself.
The model's own weights stay as they are; what is packed is a copy, so it is done only where memory is plentiful.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn

from tot.decoders.kernels.native.packing import room_for

_ROWS = 32
"""What weights are packed for; other numbers of rows run nearly as well."""
_SPARE = 3
"""Packed where so many times the weights' size is free."""


class PackedLinears:
    """The linear layers of a model, packed until `close`. Later changes of their weights are not seen."""

    def __init__(self, model: nn.Module) -> None:
        layers = [module for module in model.modules() if type(module) is nn.Linear and "forward" not in vars(module)]
        self._layers = layers if _can_be_packed(layers) else []
        for layer in self._layers:
            weight = torch.ops.mkldnn._reorder_linear_weight(layer.weight.detach(), _ROWS)
            bias = None if layer.bias is None else layer.bias.detach()
            layer.forward = partial(_linear, weight, bias)  # type: ignore[method-assign]

    def __len__(self) -> int:
        return len(self._layers)

    def close(self) -> None:
        """Give the layers their own weights back."""
        for layer in self._layers:
            vars(layer).pop("forward", None)
        self._layers = []


def _can_be_packed(layers: list[nn.Linear]) -> bool:
    available = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    if not layers or not available or not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return False
    if any(layer.weight.dtype != torch.bfloat16 or layer.weight.device.type != "cpu" for layer in layers):
        return False
    needed = _SPARE * sum(layer.weight.nbytes for layer in layers)
    return room_for("the weights of linear layers", needed, layers[0].weight.device)


def _linear(weight: Tensor, bias: Tensor | None, rows: Tensor) -> Tensor:
    """(…, in) -> (…, out)."""
    result: Tensor = torch.ops.mkldnn._linear_pointwise(rows, weight, bias, "none", [], "")
    return result
