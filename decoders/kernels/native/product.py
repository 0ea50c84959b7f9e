"""Single products in C, on the calling thread, for small networks beside a model."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from ctypes import POINTER, byref, c_int64, c_uint8, c_void_p

import numpy as np

from tot.decoders.kernels.native import compiling
from tot.decoders.kernels.native.library import address, empty, lanes, level, library, sizes_agree
from tot.decoders.kernels.native.packing import GROUP, packed
from tot.decoders.kernels.native.structures import SIZES, Matrix
from tot.decoders.models.shapes import Array

Product = Callable[[Array], Array]
"""(rows, inputs) -> (rows, outputs), float32."""


def product(weight: Array) -> Product:
    """Return the product with a weight (outputs, inputs) in float32: in integers of 8 bits if C can, else in numpy."""
    functions = _functions() if weight.shape[1] % GROUP == 0 else None
    if functions is None:
        return lambda rows: np.asarray(rows @ weight.T)
    return _InC(functions, weight)


def _functions() -> ctypes.CDLL | None:
    if level() is None:
        return None
    functions = library(*compiling.forward(64, True, "whole", lanes(), False))
    if functions is None or not sizes_agree(functions, "forward_sizes", (*SIZES, lanes())):
        return None
    functions.product.argtypes = [POINTER(Matrix), c_void_p, c_int64, c_void_p, c_void_p]
    functions.product.restype = None
    return functions


class _InC:
    """A product with packed weights."""

    def __init__(self, functions: ctypes.CDLL, weight: Array) -> None:
        self._functions = functions
        self._outputs, self._inputs = weight.shape
        self._strips, *form, codebook = packed(weight, "int8-dynamic")
        strips = address(self._strips, self._strips.dtype)
        self._matrix = Matrix(strips, None, self._inputs, self._outputs, *form, (c_uint8 * 16)(*codebook))

    def __call__(self, rows: Array) -> Array:
        rows = np.ascontiguousarray(rows, np.float32)
        out, scratch = empty((len(rows), self._outputs), np.float32), empty((2, *rows.shape), np.float32)
        inputs, outputs, memory = (address(array, np.float32) for array in (rows, out, scratch))
        self._functions.product(byref(self._matrix), inputs, len(rows), outputs, memory)
        return out
