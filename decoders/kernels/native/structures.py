"""The structs of the C sources for ctypes, read from their declarations, so that each is written once."""

from __future__ import annotations

import re
from ctypes import Structure, c_double, c_float, c_int32, c_int64, c_uint8, c_void_p
from functools import cache
from typing import Any

from tot.decoders.kernels.native.compiling import SOURCES

_NUMBERS: dict[str, Any] = {
    "int32_t": c_int32,
    "int64_t": c_int64,
    "uint8_t": c_uint8,
    "float": c_float,
    "double": c_double,
}
_FIELD = re.compile(r"(\*?)(\w+)(?:\[(\w+)\])?")


@cache
def structure(name: str) -> Any:
    """Return the class of a struct. Its fields are numbers, pointers, other structs, and arrays of these."""
    text = _headers()
    body = re.search(rf"typedef struct \{{([^}}]*)\}} {name};", text)
    assert body is not None, name
    fields = []
    for declaration in body[1].replace("const ", "").split(";")[:-1]:
        kind, names = declaration.split(maxsplit=1)
        for pointer, field, length in _FIELD.findall(names):
            of = c_void_p if pointer else _NUMBERS.get(kind) or structure(kind)
            if length:
                defined = re.search(rf"#define {length} (\d+)", text)
                of *= int(defined[1] if defined else length)
            fields.append((field, of))
    return type(name, (Structure,), {"_fields_": fields})


@cache
def _headers() -> str:
    """Return the text of all headers, without comments."""
    return re.sub(r"//.*", "", "".join(path.read_text() for path in sorted(SOURCES.glob("*.h"))))
