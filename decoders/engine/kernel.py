"""The attention kernel (attention.c): bfloat16, on CPUs that multiply it. What rows see is cut in `tiles.py`."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from tot.decoders.engine.native import library, processor_flags
from tot.decoders.engine.tiles import Tiles

_NEEDED = {"avx512f", "avx512bw", "avx512vl", "avx512_bf16"}
_MOST_GROUPS = 16
_HEAD_DIMS = (32, 64, 96, 128, 256)


class Kernel:
    """Attention over tiles, for one head dimension."""

    def __init__(self, functions: ctypes.CDLL) -> None:
        self._attend = functions.attend
        pointer, number = ctypes.c_void_p, ctypes.c_int64
        self._attend.argtypes = [
            *(pointer, number, number, pointer, pointer, number, number, pointer, pointer, pointer, pointer),
            *(number, number, number, number, ctypes.c_float, number),
        ]
        self._attend.restype = None

    def __call__(self, query: Tensor, keys: Tensor, values: Tensor, tiles: Tiles, scale: float) -> Tensor:
        """Shapes: query (heads, rows, head_dim); keys, values (kv_heads, slots, head_dim); all bfloat16 on the CPU.

        Returns (rows, heads, head_dim).
        """
        heads, rows, head_dim = query.shape
        if query.stride(2) != 1:
            query = query.contiguous()
        out = torch.empty((rows, heads, head_dim), dtype=query.dtype)
        kv_heads = keys.shape[0]
        self._attend(
            query.data_ptr(), query.stride(0), query.stride(1),
            keys.data_ptr(), values.data_ptr(), keys.stride(0), keys.stride(1), out.data_ptr(),
            tiles.slots.ctypes.data, tiles.pieces.ctypes.data, tiles.starts.ctypes.data,
            len(tiles.starts) - 1, rows, kv_heads, heads // kv_heads, scale, torch.get_num_threads(),
        )  # fmt: skip
        return out


def kernel_for(head_dim: int, groups: int, dtype: torch.dtype, device: torch.device) -> Kernel | None:
    """The kernel for a model whose `groups` query heads share a key-value head; None where torch has to do it."""
    fits = dtype == torch.bfloat16 and device.type == "cpu" and head_dim in _HEAD_DIMS and groups <= _MOST_GROUPS
    if not fits or not processor_flags() >= _NEEDED:
        return None
    functions = library("attention", "-fopenmp", f"-DHEAD_DIM={head_dim}")
    return None if functions is None else Kernel(functions)
