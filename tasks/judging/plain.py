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
_KINDS: dict[str, Callable[[list[Any]], Any]] = {
    "list": list,
    "tuple": tuple,
    "set": set,
    "frozenset": frozenset,
    "iterator": iter,
    "range": lambda ends: range(*ends),
    "complex": lambda parts: complex(*parts),
    "bytes": bytes,
    "bytearray": bytearray,
    "dict": lambda pairs: dict(pairs),
    "deque": deque,
    "Fraction": lambda parts: Fraction(*parts),
    "Decimal": lambda parts: Decimal(*parts),
}
_NUMBERS = "biufc"
"""Kinds of NumPy's arrays of numbers."""
_SEQUENCES: dict[type, str] = {list: "list", tuple: "tuple", set: "set", frozenset: "frozenset", deque: "deque"}


def pack(value: Any, name: Callable[[Any], Any]) -> str:
    """Serialize a value to one line of JSON; `name` returns the name of an object that is not plain."""
    return json.dumps(_packed(value, name))


class NaNError(Exception):
    """A value contains NaN."""


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
    if isinstance(value, int):
        return {"int": int.__format__(value, "x")}
    if isinstance(value, float):
        return {"float": float.hex(value)}
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, complex):
        return _sequence("complex", [complex.real.__get__(value), complex.imag.__get__(value)], name)
    if isinstance(value, bytes | bytearray):
        return _sequence("bytearray" if isinstance(value, bytearray) else "bytes", [*memoryview(value)], name)
    if isinstance(value, range):
        return _sequence("range", [value.start, value.stop, value.step], name)
    if isinstance(value, dict):
        return _sequence("dict", dict.items(value), name)
    if isinstance(value, Fraction):
        return _sequence("Fraction", [value.numerator, value.denominator], name)
    if isinstance(value, Decimal):
        return _sequence("Decimal", [Decimal.__str__(value)], name)
    for kind, label in _SEQUENCES.items():
        if isinstance(value, kind):
            return _sequence(label, kind.__iter__(value), name)  # type: ignore[attr-defined]
    if isinstance(value, Iterator):
        return _sequence("iterator", islice(value, _MAX_ITEMS), name)
    if isinstance(value, type({}.keys()) | type({}.values()) | type({}.items())):
        return _sequence("list", value, name)
    if (numpy := sys.modules.get("numpy")) and isinstance(value, numpy.generic | numpy.ndarray):
        if value.dtype.kind not in _NUMBERS:
            return _packed(value.tolist(), name)
        if isinstance(value, numpy.generic):
            return _packed(value.item(), name)
        return {"array": [value.dtype.str, [*value.shape], base64.b64encode(value.tobytes()).decode()]}
    return {"object": name(value)}


def _sequence(kind: str, items: Iterable[Any], name: Callable[[Any], Any]) -> dict[str, Any]:
    return {kind: [_packed(item, name) for item in items]}


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
    return _KINDS[kind]([_unpacked(item, find, nan) for item in content])


def _array(dtype: str, shape: list[int], content: str) -> Any:
    import numpy

    if numpy.dtype(dtype).kind not in _NUMBERS:
        raise ValueError(f"an array of {dtype}")
    return numpy.frombuffer(base64.b64decode(content), dtype).reshape(shape).copy()
