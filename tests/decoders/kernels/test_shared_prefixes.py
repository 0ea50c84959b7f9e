"""Prefixes that packed rows share: each path segment is read once for all rows that share it."""

from __future__ import annotations

import numpy as np

from tot.decoders.kernels.native.shared_prefixes import Run, shared_prefixes


def run(path: list[int] | range, rows: int = 1) -> Run:
    return Run(np.array(path, dtype=np.int32), len(path) - rows)


def cut(runs: list[Run]) -> tuple[list[tuple[int, int, list[int]]], list[tuple[int, int]]]:
    """Return plain values: (first tail, past the last, slots) of each share, (run, depth) of each tail."""
    shares, tails = shared_prefixes(runs, 256)
    return [(s.first, s.last, s.slots.tolist()) for s in shares], [tuple(tail) for tail in tails]


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
