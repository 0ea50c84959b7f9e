"""What computes a packed forward: the whole of it in C, or the transformers model with attention in C or in torch.

Chosen once, by `open_backend`; whoever runs it need not know which it is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, get_args

import torch
from torch import Tensor

from tot.decoders.errors import OptionError, unknown
from tot.decoders.kernels.attention import Plan, attend_blocks, make_blocks
from tot.decoders.kernels.graphs import Graphs, Rows
from tot.decoders.kernels.linear import PackedLinears
from tot.decoders.kernels.native.forward import NativeForward, Quantization, native_forward
from tot.decoders.kernels.native.packing import GROUP
from tot.decoders.kernels.native.shared_prefixes import Run
from tot.decoders.kernels.native.tiles import kernel_for, make_tiles
from tot.decoders.models.supported import LLAMA_LIKE, window_of


class TransformersForward:
    """The transformers model itself, its attention in C where there is a kernel for such heads, else in torch."""

    def __init__(self, model: Any, keys: Sequence[Tensor], values: Sequence[Tensor]) -> None:
        self._model = model
        self._keys, self._values = tuple(keys), tuple(values)
        heads_per_kv = model.config.num_attention_heads // keys[0].shape[0]
        kernel = kernel_for(keys[0].shape[2], heads_per_kv, model.dtype, model.device)
        self.name = f"transformers, attention in {'torch' if kernel is None else 'C'}"
        self.weight_bytes: float = model.dtype.itemsize
        blocks = partial(make_blocks, heads_per_kv=heads_per_kv, dtype=model.dtype, device=model.device)
        self._make: Callable[..., tuple[list[int], Any]] = make_tiles if kernel else blocks
        self._window = window_of(model.config)
        self._attend = kernel or attend_blocks
        self._linears = PackedLinears(model)
        bytes_a_key = 2 * keys[0].shape[0] * keys[0].shape[2] * model.dtype.itemsize
        graphs = partial(Graphs, self._compute, self._window, model.dtype, model.device, bytes_a_key)
        self._graphs = graphs() if model.device.type == "cuda" else None

    def cut(self, runs: Sequence[Run]) -> tuple[list[int], Any]:
        """Cut the attention of new rows. Returns the order in which runs are to be packed, and the pieces."""
        if self._graphs is not None and (rows := self._graphs.cut(runs)) is not None:
            return list(range(len(runs))), rows
        order, pieces = self._make(runs)
        found: dict[int | None, Any] = {None: pieces}
        if self._window is not None:
            found[self._window] = self._make([runs[run] for run in order], window=self._window)[1]
        return order, found

    def forward(
        self, tokens: Tensor, positions: Tensor, write: Tensor, keep: Tensor, pieces: Any, layers: Sequence[int] = ()
    ) -> tuple[Tensor, Tensor | None]:
        """Compute rows, write their keys and values into the slots `write`, and give the logits of the rows `keep`, and
        their hidden states at `layers`, numbered as `Request.states` does.

        Shapes: tokens and positions (1, rows), write (rows,), keep (kept,), all int64. Returns (kept, vocab) and, where
        there are layers, (kept, layers, hidden), float32.
        """
        if self._graphs is not None and isinstance(pieces, Rows):
            return self._graphs.forward(torch.cat([tokens, positions, write[None]]), keep, pieces, layers)
        return self._compute(tokens, positions, write, keep, pieces, layers)

    def _compute(
        self, tokens: Tensor, positions: Tensor, write: Tensor, keep: Tensor, pieces: Any, layers: Sequence[int] = ()
    ) -> tuple[Tensor, Tensor | None]:
        plan = Plan(self._keys, self._values, write, self._attend, pieces)
        result = self._model(
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
        self._keys = self._values = ()
        self._model = self._graphs = None


Backend = NativeForward | TransformersForward
"""One model over its stores of keys and values: `cut` and `forward` of both take and give the same."""


def open_backend(
    model: Any,
    keys: Sequence[Tensor],
    values: Sequence[Tensor],
    quantize: Quantization | None = None,
    owned: bool = False,
    shared: Backend | None = None,
) -> Backend:
    """The fastest there is for a model and its stores, a layer each: (kv_heads, slots, head_dim).

    With `owned` nobody else reads the model's weights. `shared` is the backend of a model whose layers these are.
    Raises OptionError for a quantization that is not known, or can't be had here.
    """
    if quantize is not None and quantize not in get_args(Quantization):
        raise OptionError(unknown("quantization", str(quantize), get_args(Quantization)))
    unread = any(hasattr(weight, "in_file") for weight in model.parameters())
    if quantize == "gguf" and not unread:
        raise OptionError(
            "quantize=gguf keeps the numbers of a .gguf file, and this model has none: try int8-dynamic, or load a "
            ".gguf file by its name"
        )
    if quantize != "gguf" and unread and shared is None:
        raise OptionError("the matrices of this model were left in its file: give quantize=gguf")
    packed = shared if isinstance(shared, NativeForward) else None
    native = native_forward(model, keys, values, quantize, owned, packed)
    if native is not None:
        return native
    if quantize is not None:
        raise OptionError(
            f"quantize={quantize} needs a model of the families {', '.join(LLAMA_LIKE)} whose layers' inputs are "
            f"multiples of {GROUP}, a CPU with AVX2 or NEON, a C compiler, and memory for the packed weights: "
            "leave it out"
        )
    return TransformersForward(model, keys, values)
