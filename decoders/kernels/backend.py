"""Backends for a packed forward pass: all of it in C, or the transformers model with attention in C or torch.

`open_backend` selects the backend of a model. All backends have the same interface.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol, get_args

import torch
from torch import Tensor

from tot.decoders.errors import ModelError, OptionError, unknown
from tot.decoders.kernels.attention import ATTENTION, Plan, attend_blocks, make_blocks, packed_attention
from tot.decoders.kernels.copies import to_device
from tot.decoders.kernels.graphs import Graphs, Rows
from tot.decoders.kernels.linear import PackedLinears
from tot.decoders.kernels.native.forward import NativeForward, Quantization, native_forward
from tot.decoders.kernels.native.packing import GROUP
from tot.decoders.kernels.native.shared_prefixes import Run
from tot.decoders.kernels.native.tiles import kernel_for, make_tiles
from tot.decoders.models.kv_store import Store
from tot.decoders.models.loaded import LoadedModel
from tot.decoders.models.shapes import Heads
from tot.decoders.models.supported import LLAMA_LIKE, window_of
from tot.decoders.models.weights import GGUFWeights


class Backend(Protocol):
    """One model and its key-value store."""

    module: Any
    """The transformers module, if the backend runs one."""

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

    def forward(
        self, tokens: Tensor, positions: Tensor, write: Tensor, keep: Tensor, pieces: Any, layers: Sequence[int] = ()
    ) -> tuple[Tensor, Tensor | None]:
        """Compute rows and write their keys and values into the slots `write`.

        Returns the logits (kept, vocab) of the rows `keep`, and, if `layers` is given, their hidden states at these
        layers (kept, layers, hidden), both float32. Layers are numbered as in `Request.states`. Shapes: tokens and
        positions (1, rows), write (rows,), keep (kept,), all int64 on the CPU.
        """

    def close(self) -> None:
        """Free the store and the packed weights."""


class TransformersForward:
    """The transformers module, with attention in C if a kernel supports its heads, otherwise in torch.

    Raises ModelError if another backend uses the module.
    """

    def __init__(self, loaded: LoadedModel) -> None:
        model: Any = loaded.model
        if model.config._attn_implementation == ATTENTION:
            raise ModelError("this model is held by another Engine: close that one, or share it by engine=")
        heads, dtype, device = Heads.of(loaded.config), loaded.dtype, loaded.device
        self.module, self._device = model, device
        kernel = kernel_for(heads.dim, heads.query // heads.kv, dtype, device)
        self.name = f"transformers, attention in {'torch' if kernel is None else 'C'}"
        self.weight_bytes: float = dtype.itemsize
        blocks = partial(make_blocks, heads_per_kv=heads.query // heads.kv, dtype=dtype, device=device)
        self._make: Callable[..., tuple[list[int], Any]] = make_tiles if kernel else blocks
        self._window = window_of(loaded.config)
        self._attend = kernel or attend_blocks
        self._linears = PackedLinears(model)
        self._store = Store((), ())
        self._allocate = partial(Store.allocate, loaded.config, dtype=dtype, device=device)
        bytes_a_key = 2 * heads.kv * heads.dim * dtype.itemsize
        graphs = partial(Graphs, self._compute, self._window, dtype, device, bytes_a_key)
        self._graphs = graphs() if device.type == "cuda" else None
        self._own_attention = model.config._attn_implementation
        from transformers import AttentionInterface  # takes two seconds, which the backend in C does without

        AttentionInterface.register(ATTENTION, packed_attention)
        model.set_attn_implementation(ATTENTION)

    def reserve(self, slots: int) -> None:
        self._store = self._allocate(slots)

    def cut(self, runs: Sequence[Run]) -> tuple[list[int], Any]:
        if self._graphs is not None and (rows := self._graphs.cut(runs)) is not None:
            return list(range(len(runs))), rows
        order, pieces = self._make(runs)
        by_window: dict[int | None, Any] = {None: pieces}
        if self._window is not None:
            by_window[self._window] = self._make([runs[run] for run in order], window=self._window)[1]
        return order, by_window

    def forward(
        self, tokens: Tensor, positions: Tensor, write: Tensor, keep: Tensor, pieces: Any, layers: Sequence[int] = ()
    ) -> tuple[Tensor, Tensor | None]:
        if self._graphs is not None and isinstance(pieces, Rows):
            return self._graphs.forward(torch.cat([tokens, positions, write[None]]), keep, pieces, layers)
        numbers = to_device(torch.cat([tokens[0], positions[0], write, keep]), torch.int64, self._device)
        tokens, positions, write, keep = torch.split(numbers, [*[len(write)] * 3, len(keep)])
        return self._compute(tokens[None], positions[None], write, keep, pieces, layers)

    def _compute(
        self, tokens: Tensor, positions: Tensor, write: Tensor, keep: Tensor, pieces: Any, layers: Sequence[int] = ()
    ) -> tuple[Tensor, Tensor | None]:
        plan = Plan(*self._store, write, self._attend, pieces)
        result = self.module(
            input_ids=tokens,
            position_ids=positions,
            use_cache=False,
            logits_to_keep=keep,
            output_hidden_states=bool(layers),
            plan=plan,
        )
        states = [result.hidden_states[layer][0, keep].float() for layer in layers]
        return result.logits[0].float(), torch.stack(states, dim=1) if states else None

    def close(self) -> None:
        self._linears.close()
        self._store = Store((), ())
        self.module.set_attn_implementation(self._own_attention)
        self.module = self._graphs = None


def open_backend(loaded: LoadedModel, quantize: Quantization | None = None, shared: Backend | None = None) -> Backend:
    """Open the fastest backend for a model. `shared` is the backend of a model with the same layers.

    Raises OptionError for a quantization that is unknown or unavailable here, ModelError as the backends do.
    """
    if quantize is not None and quantize not in get_args(Quantization):
        raise OptionError(unknown("quantization", str(quantize), get_args(Quantization)))
    if quantize == "gguf" and not isinstance(loaded.stored, GGUFWeights):
        raise OptionError(
            "quantize=gguf uses the integers of a .gguf file, and this model was not loaded from one: use int8-dynamic "
            "or load a .gguf file"
        )
    native = native_forward(loaded, quantize, shared if isinstance(shared, NativeForward) else None)
    if native is not None:
        return native
    if quantize is not None:
        raise OptionError(
            f"quantize={quantize} needs a model of the families {', '.join(LLAMA_LIKE)} whose layers' inputs are "
            f"multiples of {GROUP}, a CPU with AVX2 or NEON, a C compiler, and memory for the packed weights: "
            "omit quantize"
        )
    return TransformersForward(loaded)
