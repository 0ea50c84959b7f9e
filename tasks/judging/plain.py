"""Serialize values between two processes that do not trust each other: only plain values of built-in types are rebuilt.

Other objects stay in their process and are sent as a number. An instance of a subclass of a built-in type, which could
fake comparisons, arrives as the built-in type.
"""

from __future__ import annotations

import base64
import json
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from decimal import Decimal
from fractions import Fraction
from itertools import islice
from typing import Any

_MAX_ITEMS = 100_000
"""Maximum items of an iterator to send."""
_NUMBERS = "biufc"
"""Kinds of NumPy's arrays of numbers."""
_KINDS: dict[str, tuple[Any, Callable[[Any], Iterable[Any]], Callable[[list[Any]], Any]]] = {
    "list": ((list, type({}.keys()), type({}.values()), type({}.items())), iter, list),
    "tuple": (tuple, iter, tuple),
    "set": (set, iter, set),
    "frozenset": (frozenset, iter, frozenset),
    "deque": (deque, iter, deque),
    "dict": (dict, dict.items, lambda pairs: dict(pairs)),
    "range": (range, lambda value: (value.start, value.stop, value.step), lambda ends: range(*ends)),
    "complex": (complex, lambda value: (value.real, value.imag), lambda parts: complex(*parts)),
    "bytes": (bytes, iter, bytes),
    "bytearray": (bytearray, iter, bytearray),
    "Fraction": (Fraction, lambda value: (value.numerator, value.denominator), lambda parts: Fraction(*parts)),
    "Decimal": (Decimal, lambda value: (Decimal.__str__(value),), lambda parts: Decimal(*parts)),
    "iterator": (Iterator, lambda value: islice(value, _MAX_ITEMS), iter),
}
"""By name: the types, the parts of a value, and the function that rebuilds it from its parts."""


class NaNError(Exception):
    """A value contains NaN."""


def pack(value: Any, name: Callable[[Any], Any]) -> str:
    """Serialize a value to one line of JSON; `name` returns the name of an object that is not plain."""
    return json.dumps(_packed(value, name))


def unpack(line: str | bytes, find: Callable[[Any], Any], nan: bool = True) -> Any:
    """Read a value that `pack` wrote; `find` returns the object for a name.

    Raises ValueError for invalid input, and NaNError for NaN unless it is allowed.
    """
    try:
        return _unpacked(json.loads(line), find, nan)
    except (TypeError, KeyError, OverflowError, RecursionError) as error:
        raise ValueError(f"not a plain value: {error}") from None


def _packed(value: Any, name: Callable[[Any], Any]) -> Any:
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, int):
        return {"int": int.__format__(value, "x")}
    if isinstance(value, float):
        return {"float": float.hex(value)}
    for kind, (types, parts, _) in _KINDS.items():
        if isinstance(value, types):
            return {kind: [_packed(part, name) for part in parts(value)]}
    if (numpy := sys.modules.get("numpy")) and isinstance(value, numpy.generic | numpy.ndarray):
        if isinstance(value, numpy.generic) or value.dtype.kind not in _NUMBERS:
            return _packed(value.tolist(), name)
        return {"array": [value.dtype.str, [*value.shape], base64.b64encode(value.tobytes()).decode()]}
    return {"object": name(value)}


def _unpacked(data: Any, find: Callable[[Any], Any], nan: bool) -> Any:
    if data is None or isinstance(data, bool | str):
        return data
    if not isinstance(data, dict) or len(data) != 1:
        raise ValueError("not a plain value")
    ((kind, content),) = data.items()
    if kind == "int":
        return int(content, 16)
    if kind == "object":
        return find(content)
    if kind in ("float", "array"):
        value: Any = float.fromhex(content) if kind == "float" else _array(*content)
        if not nan and (value != value if kind == "float" else (value != value).any()):
            raise NaNError
        return value
    return _KINDS[kind][2]([_unpacked(part, find, nan) for part in content])


def _array(dtype: str, shape: list[int], content: str) -> Any:
    import numpy

    if numpy.dtype(dtype).kind not in _NUMBERS:
        raise ValueError(f"an array of {dtype}")
    return numpy.frombuffer(base64.b64decode(content), dtype).reshape(shape).copy()
