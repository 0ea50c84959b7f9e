"""Attention for packed forward passes: many branches in one row of tokens, each attending to its own path only.

`packed_attention` is registered with transformers; models stay unmodified. The plan selects the implementation: the C
kernel (`tiles.py`), or torch, in this file. For torch the work is split into blocks (query rows x key slots): one block
for each path segment that many rows share, and blocks for the remaining tails, merged by log-sum-exp. Rows never read
keys of other branches, so the cost is proportional to the live keys.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from tot.decoders.kernels.copies import to_device
from tot.decoders.kernels.native.shared_prefixes import Run, shared_prefixes, windows

_Array = np.ndarray[Any, Any]

ATTENTION = "tot_packed"
"""The name under which transformers finds `packed_attention`."""

_WORTH_SHARING = {"cpu": 256, "cuda": 2**17}
"""Minimum keys times rows saved for a separate block. Its calls cost about 0.1 ms a layer on a CPU; on a GPU kernel
launches cost more, and reading keys costs less."""
_OWN_BLOCK_ROWS = 16
"""A run of at least this number of rows is a block of its own."""


class Block(NamedTuple):
    """Attention of some query rows over some slots: `entries` independent pieces of one shape."""

    entries: int
    rows: Tensor | None
    """(entries * rows,): row numbers; None for all rows in order."""
    slots: Tensor
    """(entries * keys,): slot numbers."""
    bias: Tensor
    """(entries, 1, query heads per key-value head * rows, or 1, keys), added to scores: 0 or the lowest number."""


@dataclass(frozen=True, slots=True)
class Plan:
    """The attention of one forward pass: where rows are written, and how they attend."""

    keys: tuple[Tensor, ...]
    """(kv_heads, slots, head_dim) for each layer."""
    values: tuple[Tensor, ...]
    write: Tensor
    """(rows,): the slot of each row."""
    attend: Callable[[Tensor, Tensor, Tensor, Any, float, float, Tensor | None], Tensor]
    """The attention function: (query, keys, values, pieces, scale, cap, sinks) -> (rows, heads, head_dim)."""
    pieces: dict[int | None, Any]
    """The pieces for `attend`, by the sliding window of a layer."""


def bucket(n: int, smallest: int = 1) -> int:
    """Round up to one of four sizes per power of two, so that shapes repeat: 5, 6, 7, 8, 10, 12, 14, 16, 20, ..."""
    if n <= smallest:
        return smallest
    step = max(1, 1 << max(0, n.bit_length() - 3))
    return -(-n // step) * step


class _Cut(NamedTuple):
    """A block in numbers on the host. Row i of an entry is at position `start + i`, key j at `depth + j`."""

    rows: _Array
    """(entries * rows,): row numbers."""
    slots: _Array
    """(entries, keys): slot numbers."""
    depth: _Array
    """(entries,)"""
    start: _Array
    """(entries,)"""
    positions: int
    """Rows of an entry, or 1 if all rows see the same keys."""


def make_blocks(
    runs: Sequence[Run], heads_per_kv: int, dtype: torch.dtype, device: torch.device, window: int | None = None
) -> tuple[list[int], tuple[Block, ...]]:
    """Split the attention of `runs` into blocks. Returns the packing order of the runs, and the blocks in row numbers.

    With a `window`, rows attend to that number of tokens, and runs keep their order. All numbers go to the device in
    one copy."""
    shares, tails = shared_prefixes(runs, _WORTH_SHARING[device.type]) if window is None else windows(runs, window)
    first_row = np.concatenate([[0], np.cumsum([runs[tail.run].rows for tail in tails], dtype=np.int64)])
    total = int(first_row[-1])
    cuts = []
    for share in shares:
        keys = bucket(len(share.slots), smallest=64)
        slots = np.pad(share.slots, (0, keys - len(share.slots)), mode="edge")[None]
        last = np.array([len(share.slots) - 1])
        cuts.append(_Cut(np.arange(first_row[share.first], first_row[share.last]), slots, np.zeros_like(last), last, 1))

    groups: dict[tuple[int, int, int], list[int]] = defaultdict(list)
    for i, tail in enumerate(tails):
        run = runs[tail.run]
        alone = run.rows >= _OWN_BLOCK_ROWS
        octave = (len(run.path) - tail.depth).bit_length()
        groups[(run.rows, i, -1) if alone else (run.rows, octave, 0)].append(i)
    for (rows, *_), members in groups.items():
        keys = bucket(max(len(runs[tails[i].run].path) - tails[i].depth for i in members), smallest=32)
        slots = np.stack(
            [
                np.pad(piece := runs[tails[i].run].path[tails[i].depth :], (0, keys - len(piece)), mode="edge")
                for i in members
            ]
        )
        depth = np.array([tails[i].depth for i in members])
        start = np.array([runs[tails[i].run].start for i in members])
        cuts.append(_Cut((first_row[members][:, None] + np.arange(rows)).reshape(-1), slots, depth, start, rows))

    numbers = [array for cut in cuts for array in (cut.rows, cut.slots.reshape(-1), cut.depth, cut.start)]
    copy = to_device(np.concatenate([np.zeros(0, dtype=np.int64), *numbers]), torch.int64, device)
    copies = iter(torch.split(copy, [len(array) for array in numbers]) if numbers else ())
    blocks = []
    for cut, row_ids, slot_ids, depths, starts in zip(cuts, copies, copies, copies, copies, strict=True):
        position = depths[:, None, None] + torch.arange(cut.slots.shape[1], device=device)
        row = starts[:, None, None] + torch.arange(cut.positions, device=device)[:, None]
        hidden = position > row  # causal; also hides padding
        if window is not None:
            hidden |= position <= row - window
        bias = torch.zeros(hidden.shape, dtype=dtype, device=device).masked_fill_(hidden, torch.finfo(dtype).min)
        if cut.positions > 1:
            bias = bias.repeat(1, heads_per_kv, 1)
        all_rows = len(cut.rows) == total and bool((cut.rows == np.arange(total)).all())
        blocks.append(Block(len(cut.slots), None if all_rows else row_ids, slot_ids, bias[:, None]))
    return [tail.run for tail in tails], tuple(blocks)


def attend(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, scale: float, cap: float = 0.0
) -> tuple[Tensor, Tensor]:
    """Return attention and its log-sum-exp, for merging. Scores are soft-capped at `cap` unless it is 0.

    Shapes: query (entries, kv_heads, queries, head_dim); key, value (entries, kv_heads, keys, head_dim); bias
    broadcasts to (entries, kv_heads, queries, keys). Returns (..., queries, head_dim) and (..., queries) in float32.
    """
    if query.device.type == "cpu" and not cap:
        out, normaliser = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            query, key, value, 0.0, False, attn_mask=bias, scale=scale
        )
        return out, normaliser
    # The kernel needs a multiple of 8 keys, which blocks have.
    if not cap and key.shape[-1] % 8 == key.shape[-2] % 8 == 0 and _fused_on(query.device, query.dtype):
        expanded = None if bias is None else bias.expand(*query.shape[:-1], key.shape[-2])
        out, normaliser, *_ = torch.ops.aten._scaled_dot_product_efficient_attention(
            query, key, value, expanded, True, scale=scale
        )
        return out, normaliser[..., : query.shape[-2]]  # padded to a multiple of 32
    return attend_in_steps(query, key, value, bias, scale, cap)


@lru_cache
def _fused_on(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether a GPU has a suitable fused kernel with log-sum-exp. In float32 its products are inexact."""
    return device.type == "cuda" and dtype != torch.float32 and torch.cuda.get_device_capability(device) >= (8, 0)


def attend_in_steps(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, scale: float, cap: float = 0.0
) -> tuple[Tensor, Tensor]:
    """Compute the same as `attend` without a fused kernel.

    Scores are float32: in bfloat16 large scores have errors above 1, in float16 they overflow.
    """
    scores = torch.matmul(query.float() * scale, key.float().transpose(-1, -2))
    if cap:
        scores = cap * torch.tanh(scores / cap)
    if bias is not None:
        scores = scores + bias
    normaliser = torch.logsumexp(scores, dim=-1)
    weights = torch.exp(scores - normaliser[..., None])
    return torch.matmul(weights.to(value.dtype), value), normaliser


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
    """Write the rows' keys and values into their slots, then attend as the plan specifies. `s_aux` are sinks.

    Shapes: query (1, heads, rows, head_dim); key, value (1, kv_heads, rows, head_dim). Returns (1, rows, heads,
    head_dim). `attention_mask` is always None: the plan defines the visible keys.
    """
    if plan is None:
        raise RuntimeError("this model is held by an Engine: call engine.close() before using it elsewhere")
    layer = int(module.layer_idx)  # type: ignore[arg-type]
    keys, values = plan.keys[layer], plan.values[layer]
    keys.index_copy_(1, plan.write, key[0])
    values.index_copy_(1, plan.write, value[0])
    scale = keys.shape[2] ** -0.5 if scaling is None else scaling
    pieces = plan.pieces[sliding_window]
    return plan.attend(query[0], keys, values, pieces, scale, softcap or 0.0, s_aux)[None], None


def attend_blocks(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    blocks: Sequence[Block],
    scale: float,
    cap: float = 0.0,
    sinks: Tensor | None = None,
) -> Tensor:
    """Compute attention over blocks with torch operations. `sinks` (heads,) are scores without values.

    Shapes: query (heads, rows, head_dim); keys, values (kv_heads, slots, head_dim). Returns (rows, heads, head_dim).
    """
    kv_heads, head_dim = keys.shape[0], keys.shape[2]
    rows, groups = query.shape[1], query.shape[0] // kv_heads
    by_row = query.view(kv_heads, groups, rows, head_dim)
    out = query.new_zeros((kv_heads, groups, rows, head_dim), dtype=torch.float32)
    normaliser = out.new_full((kv_heads, groups, rows), -torch.inf)
    for block in blocks:
        selected = by_row if block.rows is None else by_row.index_select(2, block.rows)
        per_entry = selected.shape[2] // block.entries
        # (kv_heads, groups, entries, rows, dim) -> (entries, kv_heads, groups * rows, dim)
        folded = selected.reshape(kv_heads, groups, block.entries, per_entry, head_dim).permute(2, 0, 1, 3, 4)
        folded = folded.reshape(block.entries, kv_heads, groups * per_entry, head_dim)
        part, part_norm = attend(
            folded,
            keys.index_select(1, block.slots).view(kv_heads, block.entries, -1, head_dim).transpose(0, 1),
            values.index_select(1, block.slots).view(kv_heads, block.entries, -1, head_dim).transpose(0, 1),
            block.bias,
            scale,
            cap,
        )
        part = part.reshape(block.entries, kv_heads, groups, per_entry, head_dim).permute(1, 2, 0, 3, 4)
        part = part.reshape(kv_heads, groups, -1, head_dim)
        part_norm = part_norm.reshape(block.entries, kv_heads, groups, per_entry).permute(1, 2, 0, 3)
        part_norm = part_norm.reshape(kv_heads, groups, -1)
        if len(blocks) == 1:
            out, normaliser = part, part_norm
        elif block.rows is None:
            out, normaliser = _merge(out, normaliser, part, part_norm)
        else:
            part, part_norm = _merge(out[:, :, block.rows], normaliser[:, :, block.rows], part, part_norm)
            out, normaliser = out.index_copy_(2, block.rows, part), normaliser.index_copy_(2, block.rows, part_norm)
    if sinks is not None:
        out = out * torch.sigmoid(normaliser - sinks.float().view(kv_heads, groups, 1))[..., None]
    return out.reshape(-1, rows, head_dim).transpose(0, 1).to(query.dtype)


def _merge(out: Tensor, norm: Tensor, part: Tensor, part_norm: Tensor) -> tuple[Tensor, Tensor]:
    """Merge attention over two disjoint sets of keys, in float32: weights exp(norm), renormalised."""
    both = torch.logaddexp(norm, part_norm)
    return out * torch.exp(norm - both)[..., None] + part * torch.exp(part_norm - both)[..., None], both
