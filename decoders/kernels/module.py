"""The backend of a transformers module: its own layers, with packed attention in C or torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tot.decoders.errors import ModelError
from tot.decoders.kernels.attention import ATTENTION, Plan, attend_blocks, make_blocks, packed_attention
from tot.decoders.kernels.copies import to_device
from tot.decoders.kernels.graphs import Graphs, Rows
from tot.decoders.kernels.linear import PackedLinears
from tot.decoders.kernels.native.attention import kernel_for
from tot.decoders.kernels.native.shared_prefixes import Run
from tot.decoders.kernels.native.tiles import make_tiles
from tot.decoders.machine import fit_torch
from tot.decoders.models.families import window_of
from tot.decoders.models.kv_store import SCRATCH, Store
from tot.decoders.models.loaded import LoadedModel
from tot.decoders.models.shapes import Array, Heads


class TransformersForward:
    """The transformers module, with attention in C if a kernel supports its heads, otherwise in torch.

    Raises ModelError if another backend uses the module.
    """

    def __init__(self, loaded: LoadedModel) -> None:
        model: Any = loaded.model
        if model.config._attn_implementation == ATTENTION:
            raise ModelError("this model is held by another Engine: close that one, or share it by engine=")
        heads, dtype = Heads.of(loaded.config), getattr(torch, loaded.dtype.name)
        self._device = device = torch.device(loaded.device)
        self.module = model
        kernel = kernel_for(heads.dim, heads.query // heads.kv, dtype, device)
        self.name = f"transformers, attention in {'torch' if kernel is None else 'C'}"
        self.weight_bytes: float = dtype.itemsize
        blocks = partial(make_blocks, heads_per_kv=heads.query // heads.kv, dtype=dtype, device=device)
        self._make: Callable[..., tuple[list[int], Any]] = make_tiles if kernel else blocks
        self._window = window_of(loaded.config)
        self._attend = kernel or attend_blocks
        self._linears = PackedLinears(model)
        self._store = Store((), ())
        self._allocate = partial(Store.allocate, loaded.config, make=partial(_slots, dtype=dtype, device=device))
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

    @torch.inference_mode()
    def forward(self, rows: Array, keep: Array, pieces: Any, layers: Sequence[int] = ()) -> tuple[Any, Array | None]:
        if self._graphs is not None and isinstance(pieces, Rows):
            logits, states = self._graphs.forward(rows, keep, pieces, layers)
        else:
            numbers = to_device(np.concatenate([rows.reshape(-1), keep]), torch.int64, self._device)
            tokens, positions, write, kept = torch.split(numbers, [*[rows.shape[1]] * 3, len(keep)])
            logits, states = self._compute(tokens[None], positions[None], write, kept, pieces, layers)
        on_cpu = logits.device.type == "cpu"
        return logits.numpy() if on_cpu else logits, None if states is None else states.cpu().numpy()

    def _compute(
        self, tokens: Tensor, positions: Tensor, write: Tensor, keep: Tensor, pieces: Any, layers: Sequence[int] = ()
    ) -> tuple[Tensor, Tensor | None]:
        fit_torch()
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


def _slots(shape: tuple[int, int, int], dtype: torch.dtype, device: torch.device) -> Tensor:
    slots = torch.empty(shape, dtype=dtype, device=device)
    slots[:, SCRATCH] = 0
    return slots
