"""A bounded `gguf.GGUFReader` for damaged files. The original trusts all counts in a header, even past the end."""

from __future__ import annotations

from typing import Any

import gguf
import numpy as np

_MAX_LIST_ELEMENTS, _MAX_TENSORS = 2**22, 2**16
"""Maximum elements of all lists in a file's metadata (a vocabulary of 262,144 tokens has 1.4 million), and tensors."""


class BoundedReader(gguf.GGUFReader):  # type: ignore[misc]
    """A GGUF reader that raises ValueError for implausible counts and truncated files."""

    _list_elements = 0
    """Elements of all lists read so far."""

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
