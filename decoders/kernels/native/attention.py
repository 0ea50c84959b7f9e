"""Packed attention in C (attention.c) on torch tensors, for models whose forward pass runs in torch."""

from __future__ import annotations

import ctypes
from ctypes import POINTER, byref, c_int64

import torch
from torch import Tensor

from tot.decoders.kernels.native.compiling import attention
from tot.decoders.kernels.native.library import library, sizes_agree
from tot.decoders.kernels.native.tiles import SIZES, CAttention, CTiles, Tiles, kernels_run
from tot.decoders.machine import threads
from tot.decoders.models.loaded import number_type


class Kernel:
    """Attention over tiles, for one head dimension and number format."""

    def __init__(self, functions: ctypes.CDLL, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._attend = functions.attend
        self._attend.argtypes = [POINTER(CAttention), POINTER(CTiles), c_int64]
        self._attend.restype = None

    def __call__(
        self,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        tiles: Tiles,
        scale: float,
        cap: float = 0.0,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Compute attention on the CPU. Scores are soft-capped at `cap` unless it is 0.

        `sinks` (heads,) are scores without values. Shapes: query (heads, rows, head_dim);
        keys, values (kv_heads, slots, head_dim); result (rows, heads, head_dim).
        """
        heads, rows, head_dim = query.shape
        if query.stride(2) != 1:
            query = query.contiguous()
        if keys.stride() != values.stride():
            raise TypeError(f"keys have strides {keys.stride()}, values {values.stride()}: they must be equal")
        out = torch.empty((rows, heads, head_dim), dtype=query.dtype)
        kv_heads = keys.shape[0]
        floats = None if sinks is None else sinks.float().contiguous()
        attention = CAttention(
            *(_address(tensor, self._dtype) for tensor in (query, keys, values, out)),
            *(query.stride(0), query.stride(1), keys.stride(0), keys.stride(1)),
            *(rows, kv_heads, heads // kv_heads, None if floats is None else floats.data_ptr(), scale, cap),
        )
        self._attend(byref(attention), byref(CTiles.of(tiles)), threads())
        return out


def kernel_for(head_dim: int, groups: int, dtype: torch.dtype, device: torch.device) -> Kernel | None:
    """Return the kernel for a model with `groups` query heads per key-value head, or None if torch must be used."""
    if not kernels_run(head_dim, groups, number_type(str(dtype).removeprefix("torch.")), device.type):
        return None
    functions = library(*attention(head_dim, dtype == torch.float32))
    if functions is None or not sizes_agree(functions, "attention_sizes", SIZES):
        return None
    return Kernel(functions, dtype)


def _address(tensor: Tensor, dtype: torch.dtype) -> int:
    """Return the address of a tensor's data for C, which gets the strides of all dimensions but the last.

    Raises TypeError if the tensor has another dtype, layout or device."""
    if tensor.dtype != dtype or tensor.device.type != "cpu" or tensor.stride(-1) != 1:
        actual = f"{tensor.dtype} on {tensor.device} with strides {tensor.stride()}"
        raise TypeError(f"C needs a contiguous tensor of {dtype} on the CPU, and got {actual}")
    return tensor.data_ptr()
