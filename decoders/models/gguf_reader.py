"""A GGUF file: its metadata and tensors, read with a bounded `gguf.GGUFReader`.

The original trusts all counts in a header, even past the end of a damaged file.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from tot.decoders.errors import ModelError, reason
from tot.decoders.models.gguf_numbers import FLOATS, FORMATS
from tot.decoders.models.gguf_parts import gguf_parts

_MAX_LIST_ELEMENTS, _MAX_TENSORS = 2**22, 2**16
"""Maximum elements of all lists in a file's metadata (a vocabulary of 262,144 tokens has 1.4 million), and tensors."""


class BoundedReader(gguf.GGUFReader):  # type: ignore[misc]
    """A GGUF reader that raises ValueError for implausible counts and truncated files, and ModelError for tensors of
    other types than FORMATS and FLOATS."""

    _list_elements = 0
    """Elements of all lists read so far."""

    def __init__(self, path: Path) -> None:
        self._path = path
        super().__init__(path)

    def _get(self, offset: int, dtype: Any, count: int = 1, override_order: Any = None) -> Any:
        values = super()._get(offset, dtype, count, override_order)
        if len(values) < count:
            raise ValueError(f"it ends at byte {len(self.data):,}")
        return values

    def _get_field_parts(self, orig_offs: int, raw_type: int) -> Any:
        if raw_type == gguf.GGUFValueType.ARRAY:
            kind, length = self._get(orig_offs, np.uint32)[0], int(self._get(orig_offs + 4, np.uint64)[0])
            self._list_elements += length
            if kind == gguf.GGUFValueType.ARRAY or self._list_elements > _MAX_LIST_ELEMENTS:
                raise ValueError(f"a list in it has {length:,} elements of type {kind}")
        return super()._get_field_parts(orig_offs, raw_type)

    def _build_tensor_info(self, offs: int, count: int) -> Any:
        if count > _MAX_TENSORS:
            raise ValueError(f"it lists {count:,} tensors")
        return super()._build_tensor_info(offs, count)

    def _build_tensors(self, start_offs: int, fields: Any) -> None:
        names = {kind.value: kind.name for kind in gguf.GGMLQuantizationType}
        for field in fields:
            _, name, _, sizes, (kind,), _ = field.parts
            title = bytes(name).decode(errors="replace")
            if not sizes.size or not sizes.all():
                raise ValueError(f"its tensor {title} has no numbers")
            if names.get(kind) not in (*FLOATS, *FORMATS):
                raise ModelError(
                    f"{self._path} can't be used: its tensor {title} has the type {names.get(kind, f'number {kind}')}, "
                    f"and readable types are {', '.join((*FLOATS, *FORMATS))}: get another quantization of the model, "
                    "such as Q4_K_M, or run it in llama-server, and ask it with --decoder openai"
                )
        super()._build_tensors(start_offs, fields)


@dataclass(frozen=True)
class GGUFFile:
    """A GGUF file's metadata and its memory-mapped tensors (`gguf.ReaderTensor`)."""

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, Any]

    def setting(self, key: str, default: Any = None) -> Any:
        """Return the metadata value `<architecture>.<key>`."""
        return self.metadata.get(f"{self.metadata.get('general.architecture')}.{key}", default)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return a tensor's shape in torch's order."""
        return tuple(reversed(self.tensors[name].shape.tolist()))

    @property
    def quantized(self) -> bool:
        """Whether a matrix is stored as integers."""
        return any(len(tensor.shape) > 1 and tensor.tensor_type.name in FORMATS for tensor in self.tensors.values())

    def converted_bytes(self, matrices: bool = True) -> int:
        """Return the bytes of the converted folder: two per weight, plus the size of a large tokenizer."""
        sizes = [tensor.n_elements for tensor in self.tensors.values() if matrices or len(tensor.shape) == 1]
        return 2 * sum(map(int, sizes)) + 32 * 2**20


def read_gguf(path: Path) -> GGUFFile:
    """Read the header of a GGUF file and of the other parts of its model, and check that they hold all their tensors.

    Raises ModelError for a file that is not GGUF, is damaged, ends too early, or is a part of another model.
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
        reader = BoundedReader(path)
        metadata = {key: field.contents() for key, field in reader.fields.items()}
        tensors = {str(tensor.name): tensor for tensor in reader.tensors}
    except FileNotFoundError:
        raise ModelError(f"there is no file {path}") from None
    # All errors of the reader, such as for an empty file, mean an invalid GGUF file.
    except (ValueError, LookupError, TypeError, ArithmeticError, MemoryError) as error:
        raise ModelError(f"{path} is not a readable GGUF file ({reason(error)}): download it again") from error
    return GGUFFile(path, metadata, tensors)
