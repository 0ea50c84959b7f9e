"""`gguf.GGUFReader` for files that may be damaged: it loops over any count that a header gives, also past the end."""

from __future__ import annotations

from typing import Any

import gguf
import numpy as np

_MOST_LISTED, _MOST_TENSORS = 2**22, 2**16
"""Elements of all lists in a file's metadata (a vocabulary of 262,144 tokens takes 1.4 million), and tensors."""


class BoundedReader(gguf.GGUFReader):  # type: ignore[misc]
    """Raises ValueError for a count that no model has, and where the file ends too early."""

    _listed = 0
    """Elements of all lists so far."""

    def _get(self, offset: int, dtype: Any, count: int = 1, override_order: Any = None) -> Any:
        values = super()._get(offset, dtype, count, override_order)
        if len(values) < count:
            raise ValueError(f"it ends at byte {len(self.data):,}")
        return values

    def _get_field_parts(self, orig_offs: int, raw_type: int) -> Any:
        if raw_type == gguf.GGUFValueType.ARRAY:
            kind, length = self._get(orig_offs, np.uint32)[0], int(self._get(orig_offs + 4, np.uint64)[0])
            self._listed += length
            if kind == gguf.GGUFValueType.ARRAY or self._listed > _MOST_LISTED:
                raise ValueError(f"a list in it has {length:,} elements of type {kind}")
        return super()._get_field_parts(orig_offs, raw_type)

    def _build_tensor_info(self, offs: int, count: int) -> Any:
        if count > _MOST_TENSORS:
            raise ValueError(f"it lists {count:,} tensors")
        return super()._build_tensor_info(offs, count)
