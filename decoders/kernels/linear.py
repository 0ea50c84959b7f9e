"""Linear layers in bfloat16 on the CPU, with weights packed once in the layout of oneDNN's kernels.

Without packing, every call reorders the weight, which takes as long as the product itself for few rows. The packed
weight is a copy of the model's weight, so layers are packed only if memory is plentiful.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn

from tot.decoders.kernels.native.packing import room_for

_ROWS = 32
"""The number of rows that weights are packed for; other numbers are nearly as fast."""
_FREE_MEMORY_FACTOR = 3
"""Pack only if this multiple of the weights' size is free."""


class PackedLinears:
    """The linear layers of a model, packed until `close`. Later changes of their weights have no effect."""

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
        """Restore the layers' own weights."""
        for layer in self._layers:
            vars(layer).pop("forward", None)
        self._layers = []


def _can_be_packed(layers: list[nn.Linear]) -> bool:
    available = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    if not layers or not available or not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return False
    if any(layer.weight.dtype != torch.bfloat16 or layer.weight.device.type != "cpu" for layer in layers):
        return False
    needed = _FREE_MEMORY_FACTOR * sum(layer.weight.nbytes for layer in layers)
    return room_for("the weights of linear layers", needed, "cpu")


def _linear(weight: Tensor, bias: Tensor | None, rows: Tensor) -> Tensor:
    """Apply a packed layer: (..., in) -> (..., out)."""
    result: Tensor = torch.ops.mkldnn._linear_pointwise(rows, weight, bias, "none", [], "")
    return result
