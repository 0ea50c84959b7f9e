"""A GGUF file: its metadata and its memory-mapped tensors.

Reads headers many times faster than `gguf.GGUFReader`, which takes seconds for a vocabulary, and checks all counts,
which that one trusts even past the end of a damaged file.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tot.decoders.errors import ModelError, reason
from tot.decoders.models.gguf_quants import FLOATS, FORMATS
from tot.decoders.models.model_names import gguf_parts
from tot.decoders.models.shapes import Array, Shape

_MAX_LIST_ELEMENTS, _MAX_TENSORS, _MAX_DIMENSIONS = 2**22, 2**16, 4
"""Maximum elements of all lists in a file's metadata (a vocabulary of 262,144 tokens has 1.4 million), tensors, and
dimensions of a tensor."""
_FORMS = "<u1 <i1 <u2 <i2 <u4 <i4 <f4 ? <u8 <i8 <f8"
_NUMBERS = dict(zip((*range(8), 10, 11, 12), _FORMS.split(), strict=True))
_STRING, _LIST = 8, 9
"""Types of metadata values."""
_LENGTH = struct.Struct("<Q")


@dataclass(frozen=True)
class GGUFTensor:
    """A memory-mapped tensor."""

    shape: Shape
    tensor_type: Any
    """A `gguf.GGMLQuantizationType`."""
    data: Array
    """float32 or float16 numbers, or the bytes of each row of other types."""


@dataclass(frozen=True)
class GGUFFile:
    """A GGUF file's metadata and tensors."""

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, GGUFTensor]

    def setting(self, key: str, default: Any = None) -> Any:
        """Return the metadata value `<architecture>.<key>`."""
        return self.metadata.get(f"{self.metadata.get('general.architecture')}.{key}", default)

    def shape(self, name: str) -> Shape:
        """Return a tensor's shape in torch's order."""
        return self.tensors[name].shape

    @property
    def matrices(self) -> str:
        """The format that holds all matrices exactly: "integers", "bfloat16" or "float32"."""
        kinds = {tensor.tensor_type.name for tensor in self.tensors.values() if len(tensor.shape) > 1}
        return "integers" if kinds.intersection(FORMATS) else "bfloat16" if kinds <= {"BF16"} else "float32"


class _Header:
    """A cursor over the beginning of a file. Raises ValueError at the end of the file, and for impossible counts."""

    def __init__(self, content: memoryview) -> None:
        self._content, self.place, self._list_elements = content, 0, 0

    def take(self, size: int) -> memoryview:
        begin, self.place = self.place, self.place + size
        if self.place > len(self._content):
            raise ValueError(f"it ends at byte {len(self._content):,}")
        return self._content[begin : self.place]

    def number(self, kind: int) -> Any:
        return self.numbers(kind, 1)[0]

    def numbers(self, kind: int, count: int) -> list[Any]:
        if kind not in _NUMBERS:
            raise ValueError(f"it has a value of the unknown type {kind}")
        dtype = np.dtype(_NUMBERS[kind])
        values: list[Any] = np.frombuffer(self.take(count * dtype.itemsize), dtype).tolist()
        return values

    def string(self) -> str:
        (length,) = _LENGTH.unpack(self.take(8))
        return str(self.take(length), "utf-8")

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.string()
        if kind != _LIST:
            return self.number(kind)
        kind, (length,) = self.number(4), _LENGTH.unpack(self.take(8))
        self._list_elements += length
        if kind == _LIST or self._list_elements > _MAX_LIST_ELEMENTS:
            raise ValueError(f"a list in it has {length:,} elements of type {kind}")
        if kind == _STRING:
            return [self.string() for _ in range(length)]
        return self.numbers(kind, length)


def read_gguf(path: Path) -> GGUFFile:
    """Read the header of a GGUF file and of the other parts of its model, and check that they hold all their tensors.

    Raises ModelError for a file that is not GGUF, is damaged, ends too early, has tensors of other types than FORMATS
    and FLOATS, or is a part of another model.
    """
    files = [_read_file(part) for part in gguf_parts(path)]
    whole, tensors = files[0], {name: tensor for file in files for name, tensor in file.tensors.items()}
    found = sum(len(file.tensors) for file in files)
    for number, file in enumerate(files):
        header = [file.metadata.get(f"split.{key}", default) for key, default in (("no", 0), ("count", 1))]
        if header != [number, len(files)]:
            raise _foreign(file, f"split.no {header[0]} of split.count {header[1]}, not {number} of {len(files)}")
        if (listed := file.metadata.get("split.tensors.count", found)) != found or len(tensors) != found:
            raise _foreign(file, f"{listed} tensors in all, and the parts hold {found:,} ({len(tensors):,} names)")
    return GGUFFile(whole.path, whole.metadata, tensors)


def _foreign(file: GGUFFile, cause: str) -> ModelError:
    return ModelError(
        f"the header of {file.path} says {cause}: download all parts of one model to one folder, and keep their names "
        "(such as model-00001-of-00002.gguf)"
    )


def _read_file(path: Path) -> GGUFFile:
    try:
        content = np.asarray(np.memmap(path, np.uint8, "r"))
        return _parse(path, content, _Header(content.data))
    except FileNotFoundError:
        raise ModelError(f"there is no file {path}") from None
    except (ValueError, LookupError, TypeError, ArithmeticError, MemoryError) as error:
        raise ModelError(f"{path} is not a readable GGUF file ({reason(error)}): download it again") from error


def _parse(path: Path, content: Array, header: _Header) -> GGUFFile:
    if bytes(header.take(4)) != b"GGUF" or header.number(4) not in (2, 3):
        raise ValueError("it does not begin with GGUF and version 2 or 3")
    count, pairs = header.number(10), header.number(10)
    metadata: dict[str, Any] = {}
    for _ in range(pairs):
        key = header.string()
        if key in metadata:
            raise ValueError(f"it has two values of {key}")
        metadata[key] = header.value(header.number(4))
    if count > _MAX_TENSORS:
        raise ValueError(f"it lists {count:,} tensors")
    listed = {}
    for _ in range(count):
        name = header.string()
        if (dimensions := header.number(4)) > _MAX_DIMENSIONS:
            raise ValueError(f"its tensor {name} has {dimensions:,} dimensions")
        sizes = header.numbers(10, dimensions)
        if name in listed or not sizes or not all(sizes):
            raise ValueError(f"it has two tensors {name}" if name in listed else f"its tensor {name} has no numbers")
        listed[name] = tuple(reversed(sizes)), header.number(4), header.number(10)
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment <= 0 or alignment & (alignment - 1):
        raise ValueError(f"its alignment is {alignment}")
    start = -(-header.place // alignment) * alignment
    tensors = {
        name: _tensor(path, name, content, shape, kind, start + offset)
        for name, (shape, kind, offset) in listed.items()
    }
    return GGUFFile(path, metadata, tensors)


def _tensor(path: Path, name: str, content: Array, shape: Shape, kind: int, begin: int) -> GGUFTensor:
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType  # takes 0.2 s to import

    known = {of.value: of for of in GGMLQuantizationType}
    title = known[kind].name if kind in known else f"number {kind}"
    if title not in (*FLOATS, *FORMATS):
        raise ModelError(
            f"{path} can't be used: its tensor {name} has the type {title}, and readable types are "
            f"{', '.join((*FLOATS, *FORMATS))}: get another quantization of the model, such as Q4_K_M, or run it in "
            "llama-server, and ask it with --decoder openai"
        )
    block, size = GGML_QUANT_SIZES[known[kind]]
    *outer, inputs = shape
    row = inputs // block * size
    end = begin + math.prod(outer) * row
    if inputs % block or end > len(content):
        cause = f"has rows of {inputs:,}" if inputs % block else f"ends at byte {end:,} of {len(content):,}"
        raise ValueError(f"its tensor {name} {cause}")
    dtype = {"F32": np.float32, "F16": np.float16}.get(title, np.uint8)
    return GGUFTensor(shape, known[kind], content[begin:end].view(dtype).reshape(*outer, -1))
