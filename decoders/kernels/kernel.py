"""The attention kernel (attention.c), on CPUs with AVX-512. What rows see is cut in `tiles.py`."""

from __future__ import annotations

import ctypes
import logging
from ctypes import POINTER, Structure, byref, c_float, c_int32, c_int64, c_void_p, sizeof

import torch
from torch import Tensor

from tot.decoders.kernels.native import address, library, log_once, processor_flags, sizes_agree
from tot.decoders.kernels.tiles import Tiles

_ALWAYS = {"avx512f", "avx512bw", "avx512vl", "avx512dq"}
_MOST_GROUPS = 16
_MOST_DIMENSIONS = 256


class CTiles(Structure):
    """Tiles, as attention.c knows them. The arrays they were made from must outlive it."""

    _fields_ = [
        ("slots", c_void_p),
        ("pieces", c_void_p),
        ("starts", c_void_p),
        ("count", c_int64),
        ("rows", c_int64),
    ]

    @classmethod
    def of(cls, tiles: Tiles) -> CTiles:
        places = (tiles.slots.ctypes.data, tiles.pieces.ctypes.data, tiles.starts.ctypes.data)
        return cls(*places, len(tiles.starts) - 1, tiles.rows)


class _Attention(Structure):
    _fields_ = [
        *((name, c_void_p) for name in ("query", "keys", "values", "out")),
        *((name, c_int64) for name in ("head_stride", "row_stride", "kv_head_stride", "slot_stride")),
        *((name, c_int64) for name in ("rows", "kv_heads", "groups")),
        ("scale", c_float),
    ]


SIZES = (5 * sizeof(c_int32), sizeof(CTiles), sizeof(_Attention))
"""In bytes, of a piece, of tiles and of what is told of a layer."""


class Kernel:
    """Attention over tiles, for one head dimension and number format."""

    def __init__(self, functions: ctypes.CDLL, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._attend = functions.attend
        self._attend.argtypes = [POINTER(_Attention), POINTER(CTiles), c_int64]
        self._attend.restype = None

    def __call__(self, query: Tensor, keys: Tensor, values: Tensor, tiles: Tiles, scale: float) -> Tensor:
        """Shapes: query (heads, rows, head_dim); keys, values (kv_heads, slots, head_dim); all on the CPU.

        Returns (rows, heads, head_dim).
        """
        heads, rows, head_dim = query.shape
        if query.stride(2) != 1:
            query = query.contiguous()
        if keys.stride() != values.stride():
            raise TypeError(f"keys have strides {keys.stride()}, and values {values.stride()}: C knows of one")
        out = torch.empty((rows, heads, head_dim), dtype=query.dtype)
        kv_heads = keys.shape[0]
        attention = _Attention(
            *(address(tensor, self._dtype, strided=True) for tensor in (query, keys, values, out)),
            *(query.stride(0), query.stride(1), keys.stride(0), keys.stride(1)),
            *(rows, kv_heads, heads // kv_heads, scale),
        )
        self._attend(byref(attention), byref(CTiles.of(tiles)), torch.get_num_threads())
        return out


def kernel_for(head_dim: int, groups: int, dtype: torch.dtype, device: torch.device) -> Kernel | None:
    """The kernel for a model whose `groups` query heads share a key-value head; None where torch has to do it."""
    options = kernel_options(head_dim, groups, dtype, device)
    functions = None if options is None else library("attention", *options)
    if functions is None or not sizes_agree(functions, "attention_sizes", SIZES):
        return None
    return Kernel(functions, dtype)


def kernel_options(head_dim: int, groups: int, dtype: torch.dtype, device: torch.device) -> list[str] | None:
    """What attention.c is compiled with for such a model; None where it can't run here."""
    if device.type != "cpu" or groups > _MOST_GROUPS or head_dim > _MOST_DIMENSIONS:
        return None
    # Its vectors are spelled out: with more than -O1 it takes longer to compile, and no less to run.
    options = ["-O1", "-fopenmp", f"-DHEAD_DIM={head_dim}"]
    step, needed = (16, _ALWAYS) if dtype == torch.float32 else (32, _ALWAYS | {"avx512_bf16"})
    if dtype not in (torch.float32, torch.bfloat16) or head_dim % step:
        return None
    if lacking := needed - processor_flags():
        said = f"this processor lacks {', '.join(sorted(lacking))}, so attention in {dtype} is torch's, which is slower"
        log_once(logging.INFO, said)
        return None
    return [*options, "-DFLOAT32"] if dtype == torch.float32 else options
