"""Backends for a packed forward pass: in C, or as a reference the transformers module.

`open_backend` selects the backend of a model. Both have the same interface.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

from tot.decoders.errors import OptionError
from tot.decoders.kernels.native.forward import native_forward
from tot.decoders.kernels.native.packing import GROUP
from tot.decoders.kernels.native.tiles import Run
from tot.decoders.models.families import FAMILIES
from tot.decoders.models.loaded import LoadedModel
from tot.decoders.models.shapes import Array


class Backend(Protocol):
    """One model and its key-value store."""

    @property
    def name(self) -> str:
        """Description of the implementation and the weight format."""

    @property
    def weight_bytes(self) -> float:
        """Average bytes per weight."""

    def reserve(self, slots: int) -> None:
        """Allocate the key-value store with this number of slots, including SCRATCH. Call it once."""

    def cut(self, runs: Sequence[Run]) -> tuple[list[int], Any]:
        """Split the attention of new rows into pieces. Returns the packing order of the runs, and the pieces."""

    def forward(self, rows: Array, keep: Array, pieces: Any) -> Array:
        """Compute rows, and write their keys and values into slots.

        `rows` (3, rows) holds the token, the position and the slot of each row; `keep` (kept,) the rows to read, both
        int64. Returns their logits (kept, vocab), float32.
        """

    def close(self) -> None:
        """Free the store and the packed weights."""


@runtime_checkable
class SlotStore(Protocol):
    """A backend whose keys and values later processes may use, since they would compute the same ones."""

    @property
    def code(self) -> str:
        """Identifies what computes keys and values from weights."""

    def read_slots(self, slots: Sequence[int]) -> bytes:
        """Return a copy of the keys and values in slots."""

    def write_slots(self, slots: Sequence[int], content: memoryview) -> None:
        """Set the keys and values in slots to the result of `read_slots` for the same number of slots."""


def open_backend(loaded: LoadedModel) -> Backend:
    """Open the backend in C if it runs the model here, else the reference.

    Raises OptionError for integers of a file that the backend in C can't compute here, ModelError as the backends do.
    """
    native = native_forward(loaded)
    if native is not None:
        return native
    if loaded.stored is not None and loaded.stored.quantized:
        raise OptionError(
            f"quantize=gguf needs a model of the families {', '.join(FAMILIES)} whose layers' inputs are multiples of "
            f"{GROUP}, a CPU with AVX2 or NEON, and a C compiler: omit quantize, and torch computes float weights"
        )
    from tot.decoders.kernels.module import TransformersForward  # imports torch

    return TransformersForward(loaded)
