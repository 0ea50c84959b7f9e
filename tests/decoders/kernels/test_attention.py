"""Packed attention: its division into blocks, and its two kernels."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tot.decoders.kernels.attention import attend, attend_in_steps, bucket, make_blocks
from tot.decoders.kernels.native.shared_prefixes import Run, shared_prefixes

GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def run(path: list[int] | range, rows: int = 1) -> Run:
    return Run(np.array(path, dtype=np.int32), len(path) - rows)


def cut(runs: list[Run]) -> tuple[list[tuple[int, int, list[int]]], list[tuple[int, int]]]:
    """Return plain values: (first tail, past the last, slots) of each share, (run, depth) of each tail."""
    shares, tails = shared_prefixes(runs, 256)
    return [(s.first, s.last, s.slots.tolist()) for s in shares], [tuple(tail) for tail in tails]


# -- shared prefixes ----------------------------------------------------------------------------


def test_no_runs_give_no_shares_and_no_tails() -> None:
    assert cut([]) == ([], [])


def test_a_single_run_shares_nothing() -> None:
    assert cut([run(range(1, 1000), rows=7)]) == ([], [(0, 0)])


def test_a_prefix_is_shared_from_256_saved_reads() -> None:
    two, three = ([[*range(1, length + 1), 900 + i] for i in range(n)] for length, n in ((256, 2), (128, 3)))
    assert cut([run(path) for path in two]) == ([(0, 2, [*range(1, 257)])], [(0, 256), (1, 256)])
    assert cut([run(path) for path in three]) == ([(0, 3, [*range(1, 129)])], [(0, 128), (1, 128), (2, 128)])
    assert cut([run(path[1:]) for path in two]) == ([], [(0, 0), (1, 0)])
    assert cut([run(path[1:]) for path in three]) == ([], [(0, 0), (1, 0), (2, 0)])


def test_shares_nest_like_the_texts() -> None:
    trunk, left, right = [*range(1, 301)], [*range(301, 601)], [*range(601, 901)]
    runs = [run([*trunk, *limb, 1000 + i]) for i, limb in enumerate((left, right, left, right, left, [999]))]
    shares, tails = cut(runs)
    assert [tail[0] for tail in tails] == [0, 2, 4, 1, 3, 5]  # ordered so that each share covers adjacent runs
    assert sorted(shares) == [(0, 3, left), (0, 6, trunk), (3, 5, right)]
    assert tails == [(0, 600), (2, 600), (4, 600), (1, 600), (3, 600), (5, 300)]


def test_a_stretch_too_short_for_a_block_stays_in_the_tails() -> None:
    trunk = [*range(1, 301)]
    runs = [run([*trunk, 400, 401, i]) for i in (500, 501)] + [run([*trunk, 402, i]) for i in (502, 503)]
    assert cut(runs) == ([(0, 4, trunk)], [(0, 300), (1, 300), (2, 300), (3, 300)])


def test_a_share_ends_before_the_first_row() -> None:
    """Runs of several rows attend causally to their own new tokens, so a share ends before the first of them."""
    path = [*range(1, 400)]
    shares, tails = cut([run(path, rows=30), run(path, rows=1), run([*path[:380], 900], rows=1)])
    assert shares == [(0, 3, path[:369])]
    assert tails == [(0, 369), (1, 369), (2, 369)]


paths = st.lists(
    st.tuples(st.lists(st.tuples(st.integers(0, 1), st.integers(1, 200)), min_size=1, max_size=4), st.integers(1, 60)),
    min_size=1,
    max_size=8,
)


def slots_of(stretches: list[tuple[int, int]]) -> list[int]:
    """Map stretches of (branch choice, length) to slots, equal only for equal prefixes."""
    path: list[int] = []
    node = 1
    for way, length in stretches:
        for _ in range(length):
            node = (node * 1_000_003 + way + 1) % 2**31
            path.append(node)
    return path


@given(paths)
def test_shares_and_tail_cover_each_runs_path_once(drawn: list[tuple[list[tuple[int, int]], int]]) -> None:
    runs = [run(path, min(rows, len(path))) for path, rows in ((slots_of(way), rows) for way, rows in drawn)]
    shares, tails = shared_prefixes(runs, 256)
    assert sorted(tail.run for tail in tails) == list(range(len(runs)))
    for i, tail in enumerate(tails):
        of_run = [share.slots for share in shares if share.first <= i < share.last]
        shared = np.concatenate(
            [*sorted(of_run, key=lambda s: int(np.flatnonzero(runs[tail.run].path == s[0])[0])), np.array([], np.int32)]
        )
        assert len(shared) == tail.depth <= runs[tail.run].start
        assert np.array_equal(shared, runs[tail.run].path[: tail.depth])


@given(paths, st.one_of(st.none(), st.sampled_from([1, 8, 33, 200])))
def test_every_row_attends_to_exactly_its_own_path(
    drawn: list[tuple[list[tuple[int, int]], int]], window: int | None
) -> None:
    paths = [slots_of(way) for way, _ in drawn]
    number = {slot: i for i, slot in enumerate(sorted({slot for path in paths for slot in path}))}
    runs = [run([number[s] for s in path], min(rows, len(path))) for path, (_, rows) in zip(paths, drawn, strict=True)]
    order, blocks = make_blocks(runs, 1, torch.float32, torch.device("cpu"), window)
    ends = [(runs[r].path, end + 1) for r in order for end in range(runs[r].start, len(runs[r].path))]
    expected = [path[0 if window is None else max(0, end - window) : end].tolist() for path, end in ends]
    seen: list[list[int]] = [[] for _ in expected]
    for block in blocks:
        rows = torch.arange(len(expected)) if block.rows is None else block.rows
        slots = block.slots.view(block.entries, -1)
        bias = block.bias[:, 0].expand(-1, len(rows) // block.entries, -1)
        for entry, per_row in enumerate(rows.view(block.entries, -1)):
            for i, row in enumerate(per_row.tolist()):
                seen[row] += slots[entry][bias[entry, i] == 0].tolist()
    assert [sorted(s) for s in seen] == [sorted(s) for s in expected]


def test_buckets_have_four_sizes_per_octave() -> None:
    assert [bucket(n) for n in (0, 1, 2, 3, 4, 5, 7, 8, 9, 11, 13, 16, 17, 33, 65, 1000)] == (
        [1, 1, 2, 3, 4, 5, 7, 8, 10, 12, 14, 16, 20, 40, 80, 1024]
    )
    assert [bucket(n, smallest=64) for n in (1, 64, 65)] == [64, 64, 80]
    assert len({bucket(n) for n in range(1025, 2049)}) == 4
    assert all(n <= bucket(n) <= 1.25 * n + 1 for n in range(1, 5000))


# -- kernels ----------------------------------------------------------------------------------


@pytest.mark.parametrize(("dtype", "close"), [(torch.float32, 1e-5), (torch.bfloat16, 3e-2)])
@pytest.mark.parametrize("masked", ["", "by rows", "alike"])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=GPU)])
def test_the_fused_and_the_stepwise_kernel_agree(dtype: torch.dtype, close: float, masked: str, device: str) -> None:
    torch.manual_seed(0)
    query, key, value = (torch.randn(3, 2, n, 16).to(device, dtype) for n in (10, 48, 48))
    bias = torch.zeros(3, 1, 1 if masked == "alike" else 10, 48, dtype=dtype, device=device)
    bias[:, :, bias.shape[2] // 3 :, 30:] = torch.finfo(dtype).min
    args = (query, key, value, bias if masked else None, 0.3)
    for fused, steps in zip(attend(*args), attend_in_steps(*args), strict=True):
        assert fused.shape == steps.shape
        torch.testing.assert_close(fused.float(), steps.float(), atol=close, rtol=0)


@pytest.mark.parametrize("kernel", [attend, attend_in_steps])
def test_a_kernel_computes_softmax_attention_and_its_normaliser(kernel: Callable[..., tuple[Tensor, Tensor]]) -> None:
    torch.manual_seed(1)
    query, key, value = (torch.randn(2, 3, n, 8, dtype=torch.float32) for n in (5, 20, 20))
    bias = torch.where(torch.rand(2, 1, 5, 20) < 0.3, torch.finfo(torch.float32).min, 0.0)
    out, normaliser = kernel(query, key, value, bias, 0.5)
    scores = query.double() @ key.double().mT * 0.5 + bias
    torch.testing.assert_close(out.double(), scores.softmax(-1) @ value.double(), atol=1e-5, rtol=0)
    torch.testing.assert_close(normaliser.double(), scores.logsumexp(-1), atol=1e-5, rtol=0)


@pytest.mark.parametrize(("dtype", "close"), [(torch.bfloat16, 2e-2), (torch.float16, 3e-3)])
@pytest.mark.parametrize("size", [1.0, 4.0, 30.0, 90.0])
def test_large_scores_are_as_accurate_as_small_ones(dtype: torch.dtype, close: float, size: float) -> None:
    """Products reach a million: bfloat16 rounding is off by thousands, and float16 overflows."""
    torch.manual_seed(0)
    query, key, value = ((torch.randn(2, 3, n, 64) * times).to(dtype) for n, times in ((40, size), (40, size), (40, 1)))
    products = query.double() @ key.double().mT
    exact = torch.nn.functional.scaled_dot_product_attention(query.double(), key.double(), value.double(), scale=0.125)
    out, normaliser = attend_in_steps(query, key, value, None, 0.125)
    assert (products.abs().max() > torch.finfo(torch.float16).max) == (size == 90.0)
    torch.testing.assert_close(out.double(), exact, atol=close, rtol=0)
    torch.testing.assert_close(normaliser.double(), (products * 0.125).logsumexp(-1), atol=1e-5, rtol=1e-6)
