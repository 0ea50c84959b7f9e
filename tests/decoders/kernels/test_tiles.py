"""Packed attention in tiles, and attention.h, which reads them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from ml_dtypes import bfloat16
from torch import Tensor

from tot.decoders.kernels.native.tiles import Run, kernels_run, make_tiles

Kernel = Callable[..., Callable[..., Tensor]]
formats = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])


@st.composite
def texts(draw: Any) -> list[Run]:
    """Generate runs of one or more rows over texts that share prefixes on several levels."""
    slots = iter(range(1, 10**6))
    trunk = [next(slots) for _ in range(draw(st.integers(0, 90)))]
    limbs = [[next(slots) for _ in range(draw(st.integers(1, 60)))] for _ in range(draw(st.integers(1, 4)))]
    runs = []
    for limb in draw(st.lists(st.sampled_from(limbs), min_size=1, max_size=30)):
        rows = draw(st.sampled_from([1, 1, 1, 2, 7, 40]))
        path = [*trunk, *limb, *(next(slots) for _ in range(rows + draw(st.integers(0, 40))))]
        runs.append(Run(np.array(path, dtype=np.int32), len(path) - rows))
    return runs


def seen_by(runs: list[Run], order: list[int], window: int | None = None) -> list[list[int]]:
    """Return the slots that each row attends to."""
    ends = [(runs[r].path, end + 1) for r in order for end in range(runs[r].start, len(runs[r].path))]
    return [path[0 if window is None else max(0, end - window) : end].tolist() for path, end in ends]


windows = st.one_of(st.none(), st.sampled_from([1, 2, 8, 33, 200]))


@given(texts(), windows)
def test_every_row_attends_to_exactly_its_own_path(runs: list[Run], window: int | None) -> None:
    order, tiles = make_tiles(runs, window)
    expected = seen_by(runs, order, window)
    assert sorted(order) == list(range(len(runs)))
    assert len(tiles.starts) == -(-len(expected) // tiles.rows) + 1
    seen: list[list[int]] = [[] for _ in expected]
    for tile, (start, end) in enumerate(zip(tiles.starts, tiles.starts[1:], strict=False)):
        for first, last, offset, count, step, hidden in tiles.pieces[start:end].tolist():
            assert 0 <= first < last <= tiles.rows
            for row in range(first, last):
                further = step * (row - first)
                seen_from = offset + max(0, hidden + further)
                seen[tile * tiles.rows + row] += tiles.slots[seen_from : offset + count + further].tolist()
    assert [sorted(row) for row in seen] == [sorted(row) for row in expected]


@pytest.mark.parametrize(
    ("dtype", "head_dim", "kv_heads", "groups"),
    [
        *((torch.bfloat16, *shape) for shape in [(32, 2, 1), (64, 3, 3), (96, 1, 5), (128, 2, 4), (256, 1, 2)]),
        *((torch.float32, *shape) for shape in [(16, 2, 1), (64, 3, 3), (80, 1, 5), (128, 2, 4), (256, 1, 2)]),
    ],
)
@given(runs=texts(), window=windows, cap=st.sampled_from([0.0, 2.0, 50.0]))
def test_the_kernel_computes_softmax_attention(
    kernel: Kernel,
    exact_attention: Callable[..., Tensor],
    dtype: torch.dtype,
    head_dim: int,
    kv_heads: int,
    groups: int,
    runs: list[Run],
    window: int | None,
    cap: float,
) -> None:
    order, tiles = make_tiles(runs, window)
    paths = seen_by(runs, order, window)
    random = torch.Generator().manual_seed(len(paths))
    slot_count = max(map(max, paths)) + 1
    keys, values = (torch.randn(kv_heads, slot_count, head_dim, generator=random).to(dtype) for _ in range(2))
    query = 2 * torch.randn(len(paths), kv_heads * groups, head_dim, generator=random).to(dtype)
    out = kernel(head_dim, dtype)(query.transpose(0, 1), keys, values, tiles, 0.3, cap)
    exact = exact_attention(query.transpose(0, 1), keys, values, paths, cap)
    # In bfloat16, weights and results are rounded to 8 bits. A cap of 50 multiplies the error of exponentials by 50.
    coarse = 1.0 if dtype == torch.bfloat16 else 5e-3 if cap else 2e-3
    assert torch.allclose(out.double(), exact, atol=2e-2 * coarse, rtol=2e-2 * coarse)
    assert (out.double() - exact).abs().mean() < 2e-3 * coarse


def branches(rows: int, shared: int, own: int) -> list[Run]:
    """Return runs of one row each, for `rows` texts with a shared prefix."""
    paths = [[*range(1, shared + 1), *(shared + 1 + own * i + j for j in range(own))] for i in range(rows)]
    return [Run(np.array(path, dtype=np.int32), len(path) - 1) for path in paths]


@formats
@pytest.mark.parametrize("rows", [1, 2, 7, 20])
@pytest.mark.parametrize(("shared", "own"), [(2500, 3), (1100, 400), (30, 1200)])
def test_long_texts_are_divided_among_threads_and_joined(
    kernel: Kernel, exact_attention: Callable[..., Tensor], dtype: torch.dtype, rows: int, shared: int, own: int
) -> None:
    runs = branches(rows, shared, own)
    order, tiles = make_tiles(runs)
    random = torch.Generator().manual_seed(rows)
    keys, values = (torch.randn(1, shared + rows * own + 1, 64, generator=random).to(dtype) for _ in range(2))
    query = 2 * torch.randn(2, rows, 64, generator=random).to(dtype)
    out = kernel(64, dtype)(query, keys, values, tiles, 0.3)
    exact = exact_attention(query, keys, values, [runs[r].path.tolist() for r in order])
    coarse = 1.0 if dtype == torch.bfloat16 else 1e-3
    assert torch.allclose(out.double(), exact, atol=2e-2 * coarse, rtol=2e-2 * coarse)


@formats
def test_scores_far_apart_do_not_overflow(kernel: Kernel, dtype: torch.dtype) -> None:
    _, tiles = make_tiles([Run(np.arange(1, 80, dtype=np.int32), 78)])
    keys, values = torch.zeros(1, 80, 32, dtype=dtype), torch.zeros(1, 80, 32, dtype=dtype)
    keys[0, 40, 0], values[0, 40] = 1e4, 3.0  # far above all others, so that earlier keys lose all weight
    query = torch.zeros(1, 1, 32, dtype=dtype)
    query[0, 0, 0] = 1e4
    assert kernel(32, dtype)(query, keys, values, tiles, 1.0).tolist() == [[[3.0] * 32]]
    query[0, 0, 0] = -1e4
    assert kernel(32, dtype)(query, keys, values, tiles, 1.0).tolist() == [[[0.0] * 32]]


@pytest.mark.parametrize(
    ("head_dim", "groups", "dtype"),
    [
        *[(48, 1, bfloat16), (24, 1, np.float32), (512, 1, np.float32), (64, 17, np.float32)],
        (64, 1, np.float16),
    ],
)
def test_unsupported_shapes_are_left_to_torch(head_dim: int, groups: int, dtype: Any) -> None:
    assert not kernels_run(head_dim, groups, np.dtype(dtype), "cpu")
