"""Attention for packed forwards: many branches in one row of tokens, each seeing its own path only.

`packed_attention` is registered with transformers; models stay unmodified. What computes it is in the plan: the kernel
in C (`tiles.py`), or torch, here. For torch the work is cut into blocks (query rows x key slots): one block for every
stretch of text that many rows share, blocks of tails for what is left, merged by log-sum-exp. Rows never meet keys of
other branches, so the cost is that of the live keys.
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

from tot.decoders.kernels.native.shared_prefixes import Run, shared_prefixes, windows

_Array = np.ndarray[Any, Any]

ATTENTION = "tot_packed"
"""The name under which transformers finds `packed_attention`."""

_WORTH_SHARING = {"cpu": 256, "cuda": 2**17}
"""Keys times rows saved from which a block of its own pays for its calls: about 0.1 ms a layer on a CPU; a GPU takes
longer to be asked, and reads keys in no time."""
_OWN_BLOCK_ROWS = 16
"""Runs of this many rows fill a kernel by themselves."""


class Block(NamedTuple):
    """Some query rows against some slots; `entries` independent pieces of one shape."""

    entries: int
    rows: Tensor | None
    """(entries * rows,) row numbers; None for all rows in order."""
    slots: Tensor
    """(entries * keys,) slot numbers."""
    bias: Tensor
    """(entries, 1, heads a KV head * rows, or 1, keys), added to the scores: none, or a very negative number."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What every layer of one forward does: where rows are written, and what then reads for them."""

    keys: tuple[Tensor, ...]
    """A layer each: (kv_heads, slots, head_dim)."""
    values: tuple[Tensor, ...]
    write: Tensor
    """(rows,) the slot of each row."""
    attend: Callable[[Tensor, Tensor, Tensor, Any, float, float], Tensor]
    """Query (heads, rows, head_dim), keys, values, pieces, scale and cap in, (rows, heads, head_dim) out."""
    pieces: dict[int | None, Any]
    """What the rows' attention was cut into for `attend`, by the window of a layer."""


def bucket(n: int, smallest: int = 1) -> int:
    """Round up to one of four sizes an octave, so that shapes repeat: 5, 6, 7, 8, 10, 12, 14, 16, 20, …"""
    if n <= smallest:
        return smallest
    step = max(1, 1 << max(0, n.bit_length() - 3))
    return -(-n // step) * step


def make_blocks(
    runs: Sequence[Run], heads_per_kv: int, dtype: torch.dtype, device: torch.device, window: int | None = None
) -> tuple[list[int], tuple[Block, ...]]:
    """Cut the attention of `runs` into blocks. Returns the packing order of the runs, and the blocks in row numbers.
    With a `window` rows see so many tokens, and are packed in the order of the runs."""
    shares, tails = shared_prefixes(runs, _WORTH_SHARING[device.type]) if window is None else windows(runs, window)
    first_row = np.concatenate([[0], np.cumsum([runs[tail.run].rows for tail in tails])])
    total = int(first_row[-1])
    minus = torch.finfo(dtype).min

    def block(entries: int, rows: _Array, slots: _Array, seen: _Array) -> Block:
        bias = torch.zeros(seen.shape, dtype=dtype).masked_fill_(torch.from_numpy(~seen), minus)
        if seen.shape[1] > 1:
            bias = bias.repeat(1, heads_per_kv, 1)
        everything = len(rows) == total and bool((rows == np.arange(total)).all())
        row_ids = None if everything else torch.from_numpy(rows.astype(np.int64)).to(device)
        slot_ids = torch.from_numpy(slots.astype(np.int64).reshape(-1)).to(device)
        return Block(entries, row_ids, slot_ids, bias[:, None].to(device))

    blocks = []
    for share in shares:
        keys = bucket(len(share.slots), smallest=64)
        slots = np.pad(share.slots, (0, keys - len(share.slots)), mode="edge")
        seen = (np.arange(keys) < len(share.slots))[None, None]
        blocks.append(block(1, np.arange(first_row[share.first], first_row[share.last]), slots, seen))

    alike: dict[tuple[int, int, int], list[int]] = defaultdict(list)
    for i, tail in enumerate(tails):
        run = runs[tail.run]
        alone = run.rows >= _OWN_BLOCK_ROWS
        octave = (len(run.path) - tail.depth).bit_length()
        alike[(run.rows, i, -1) if alone else (run.rows, octave, 0)].append(i)
    for (rows, *_), members in alike.items():
        keys = bucket(max(len(runs[tails[i].run].path) - tails[i].depth for i in members), smallest=32)
        slots = np.stack(
            [
                np.pad(piece := runs[tails[i].run].path[tails[i].depth :], (0, keys - len(piece)), mode="edge")
                for i in members
            ]
        )
        depth = np.array([tails[i].depth for i in members])[:, None, None]
        start = np.array([runs[tails[i].run].start for i in members])[:, None, None]
        position, row = depth + np.arange(keys)[None, None], start + np.arange(rows)[None, :, None]
        seen = position <= row  # causal; hides padding too
        if window is not None:
            seen &= position > row - window
        row_ids = (first_row[members][:, None] + np.arange(rows)[None]).reshape(-1)
        blocks.append(block(len(members), row_ids, slots, seen))
    return [tail.run for tail in tails], tuple(blocks)


def attend(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, scale: float, cap: float = 0.0
) -> tuple[Tensor, Tensor]:
    """Attention and its normaliser, for merging; scores are capped softly at `cap`, unless that is 0.

    Shapes: query (entries, kv_heads, queries, head_dim); key, value (entries, kv_heads, keys, head_dim); bias
    broadcasts to (entries, kv_heads, queries, keys). Returns (…, queries, head_dim) and (…, queries) in float32.
    """
    if query.device.type == "cpu" and not cap:
        out, normaliser = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            query, key, value, 0.0, False, attn_mask=bias, scale=scale
        )
        return out, normaliser
    # Blocks have keys by eights, as the kernel wants them.
    if not cap and key.shape[-1] % 8 == key.shape[-2] % 8 == 0 and _fused_on(query.device, query.dtype):
        seen = None if bias is None else bias.expand(*query.shape[:-1], key.shape[-2])
        out, normaliser, *_ = torch.ops.aten._scaled_dot_product_efficient_attention(
            query, key, value, seen, True, scale=scale
        )
        return out, normaliser[..., : query.shape[-2]]  # made for a multiple of 32
    return attend_in_steps(query, key, value, bias, scale, cap)


@lru_cache
def _fused_on(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether a GPU has a fused kernel that gives normalisers: in float32 its products are not exact."""
    return device.type == "cuda" and dtype != torch.float32 and torch.cuda.get_device_capability(device) >= (8, 0)


def attend_in_steps(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, scale: float, cap: float = 0.0
) -> tuple[Tensor, Tensor]:
    """The same, spelled out where no fused kernel gives the normaliser.

    Scores are float32 from the start: in bfloat16 large ones are off by whole numbers, in float16 they overflow.
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
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The attention function: writes the rows' keys and values into their slots, then reads by the plan.

    Shapes: query (1, heads, rows, head_dim); key, value (1, kv_heads, rows, head_dim). Returns (1, rows, heads,
    head_dim). `attention_mask` is always None here: the plan says who sees what.
    """
    if plan is None:
        raise RuntimeError("this model is held by an Engine: call engine.close() before using it elsewhere")
    layer = int(module.layer_idx)  # type: ignore[arg-type]
    keys, values = plan.keys[layer], plan.values[layer]
    keys.index_copy_(1, plan.write, key[0])
    values.index_copy_(1, plan.write, value[0])
    scale = keys.shape[2] ** -0.5 if scaling is None else scaling
    return plan.attend(query[0], keys, values, plan.pieces[sliding_window], scale, softcap or 0.0)[None], None


def attend_blocks(
    query: Tensor, keys: Tensor, values: Tensor, blocks: Sequence[Block], scale: float, cap: float = 0.0
) -> Tensor:
    """Attention over blocks by torch's operations.

    Shapes: query (heads, rows, head_dim); keys, values (kv_heads, slots, head_dim). Returns (rows, heads, head_dim).
    """
    kv_heads, head_dim = keys.shape[0], keys.shape[2]
    rows, groups = query.shape[1], query.shape[0] // kv_heads
    by_row = query.view(kv_heads, groups, rows, head_dim)
    out = query.new_zeros((kv_heads, groups, rows, head_dim), dtype=torch.float32)
    normaliser = out.new_full((kv_heads, groups, rows), -torch.inf)
    for block in blocks:
        chosen = by_row if block.rows is None else by_row.index_select(2, block.rows)
        per_entry = chosen.shape[2] // block.entries
        # (kv_heads, groups, entries, rows, dim) -> (entries, kv_heads, groups * rows, dim)
        folded = chosen.reshape(kv_heads, groups, block.entries, per_entry, head_dim).permute(2, 0, 1, 3, 4)
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
            out = part
        elif block.rows is None:
            out, normaliser = _merge(out, normaliser, part, part_norm)
        else:
            part, part_norm = _merge(out[:, :, block.rows], normaliser[:, :, block.rows], part, part_norm)
            out, normaliser = out.index_copy_(2, block.rows, part), normaliser.index_copy_(2, block.rows, part_norm)
    return out.reshape(-1, rows, head_dim).transpose(0, 1).to(query.dtype)


def _merge(out: Tensor, norm: Tensor, part: Tensor, part_norm: Tensor) -> tuple[Tensor, Tensor]:
    """Two attentions over disjoint keys become the one over both: weights exp(norm), renormalised, in float32."""
    both = torch.logaddexp(norm, part_norm)
    return out * torch.exp(norm - both)[..., None] + part * torch.exp(part_norm - both)[..., None], both
