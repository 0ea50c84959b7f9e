"""The reference backend: a transformers module on a CPU or GPU, whose attention reads the slots of each branch.

Models stay unmodified: `packed_attention` is registered with transformers. It attends to one branch after another with
torch's operations, which is simple, not fast. A model of a family outside FAMILIES is verified when it is opened.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from tot.decoders.errors import ModelError, reason
from tot.decoders.kernels.native.tiles import Run
from tot.decoders.machine import fit_torch
from tot.decoders.models.families import FAMILIES
from tot.decoders.models.loaded import LoadedModel
from tot.decoders.models.shapes import Array, Heads

ATTENTION = "tot_packed"
"""The name under which transformers finds `packed_attention`."""
_TEXTS = ([1, 2, 3, 4, 5, 6], [1, 2, 3, 7, 8, 9])
"""The texts that verify a model: two branches with a common prefix. Each token is also the number of its slot."""
_TOLERANCE, _COARSE_TOLERANCE = 1e-3, 0.2
"""Maximum error of a logit in a verification, in standard deviations of the logits: in float32, and otherwise."""


class Plan(NamedTuple):
    """The attention of one forward pass."""

    store: Tensor
    """(layers, 2, kv_heads, slots, head_dim): keys and values."""
    write: Tensor
    """(rows,): the slot of each row."""
    branches: Sequence[tuple[int, Tensor]]
    """The rows of each branch, and (keys,): its slots up to the last of these rows."""


class TransformersForward:
    """The transformers module and its key-value store. Raises ModelError if another backend uses the module."""

    name = "transformers"

    def __init__(self, loaded: LoadedModel) -> None:
        model: Any = loaded.model
        if model.config._attn_implementation == ATTENTION:
            raise ModelError("this model is held by another Engine: close that one, or share it by engine=")
        dtype = getattr(torch, loaded.dtype.name)
        self._module: Any = model
        self._device = torch.device(loaded.device)
        self.weight_bytes: float = dtype.itemsize
        self._config, self._dtype = loaded.config, dtype
        self._store: Tensor | None = None
        self._own_attention = model.config._attn_implementation
        from transformers import AttentionInterface  # takes two seconds, which the backend in C does without

        AttentionInterface.register(ATTENTION, packed_attention)
        if loaded.config.model_type in FAMILIES:
            model.set_attn_implementation(ATTENTION)
        else:
            self._verify(loaded.name, _TOLERANCE if dtype == torch.float32 else _COARSE_TOLERANCE)

    def _verify(self, name: str, tolerance: float) -> None:
        """Raise ModelError unless packed branches get the logits of their texts alone."""
        first, second = _TEXTS
        tokens, positions = [*first, *second[3:]], [*range(6), *range(3, 6)]
        problem = "it computes packed branches wrongly"
        try:
            with torch.inference_mode():
                alone = self._module(input_ids=torch.tensor(_TEXTS, device=self._device), use_cache=False)
            expected = alone.logits[:, -1].float().cpu().numpy()
            self._module.set_attn_implementation(ATTENTION)
            self.reserve(len(tokens) + 1)
            _, branches = self.cut([Run(np.array(first, np.int32), 0), Run(np.array(second, np.int32), 3)])
            logits = self.forward(np.array([tokens, positions, tokens]), np.array([5, 8]), branches)
            if np.abs(logits - expected).max() <= tolerance * expected.std():
                return
        except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
            problem = reason(error)
        self.close()
        raise ModelError(
            f"{name} can't be run here ({problem}): run it in a server, such as vLLM, and ask it with --decoder openai"
        )

    def reserve(self, slots: int) -> None:
        heads, layers = Heads.of(self._config), self._config.num_hidden_layers
        self._store = torch.empty((layers, 2, heads.kv, slots, heads.dim), dtype=self._dtype, device=self._device)

    def cut(self, runs: Sequence[Run]) -> tuple[list[int], Sequence[tuple[int, Tensor]]]:
        paths = [torch.as_tensor(run.path, dtype=torch.int64, device=self._device) for run in runs]
        return list(range(len(runs))), [(run.rows, path) for run, path in zip(runs, paths, strict=True)]

    @torch.inference_mode()
    def forward(self, rows: Array, keep: Array, pieces: Sequence[tuple[int, Tensor]]) -> Array:
        assert self._store is not None
        fit_torch()
        tokens, positions, write = torch.as_tensor(rows, device=self._device)
        kept = torch.as_tensor(keep, device=self._device)
        result = self._module(
            input_ids=tokens[None],
            position_ids=positions[None],
            use_cache=False,
            logits_to_keep=kept,
            plan=Plan(self._store, write, pieces),
        )
        logits: Array = result.logits[0].float().cpu().numpy()
        return logits

    def close(self) -> None:
        self._store = None
        self._module.set_attn_implementation(self._own_attention)
        self._module = None


def packed_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    plan: Plan | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Write the rows' keys and values into their slots, then attend from each row to its branch. `s_aux` are sinks.

    Shapes: query (1, heads, rows, head_dim); key, value (1, kv_heads, rows, head_dim). Returns (1, rows, heads,
    head_dim). `attention_mask` is always None: the plan defines the visible keys.
    """
    if plan is None:
        raise RuntimeError("this model is held by an Engine: call engine.close() before using it elsewhere")
    layer = int(module.layer_idx)  # type: ignore[arg-type]
    keys, values = plan.store[layer]
    keys[:, plan.write], values[:, plan.write] = key[0], value[0]
    scale = query.shape[3] ** -0.5 if scaling is None else scaling
    parts = zip(torch.split(query[0], [rows for rows, _ in plan.branches], dim=1), plan.branches, strict=True)
    attended = [
        attend(part, keys[:, slots], values[:, slots], scale, sliding_window, softcap or 0.0, s_aux)
        for part, (_, slots) in parts
    ]
    return torch.cat(attended, dim=1).transpose(0, 1)[None], None


def attend(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    scale: float,
    window: int | None = None,
    cap: float = 0.0,
    sinks: Tensor | None = None,
) -> Tensor:
    """Compute causal attention from the last rows of a text to its keys.

    With a `window`, rows attend to that number of tokens. Scores are soft-capped at `cap` unless it is 0. `sinks`
    (heads,) are scores without values. Shapes: query (heads, rows, head_dim); keys, values (kv_heads, keys, head_dim).
    Returns (heads, rows, head_dim).
    """
    (heads, rows, _), (kv_heads, length, _) = query.shape, keys.shape
    position = torch.arange(length, device=keys.device)
    row = position[length - rows :, None]
    visible = position <= row
    if window is not None:
        visible &= position > row - window
    visible = visible.repeat(heads // kv_heads, 1)  # the query heads of a key-value head are rows
    scores = torch.matmul(query.reshape(kv_heads, -1, query.shape[2]).float(), keys.float().mT) * scale
    if cap:
        scores = cap * torch.tanh(scores / cap)
    scores = scores.masked_fill(~visible, -torch.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks.float().view(kv_heads, -1, 1).repeat_interleave(rows, dim=1)], dim=2)
    weights = torch.softmax(scores, dim=2)[:, :, :length]
    return torch.matmul(weights, values.float()).to(query.dtype).reshape(heads, rows, -1)
