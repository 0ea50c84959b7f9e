"""Small forwards row by row: the inputs of a captured CUDA graph, and graphs on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from tot.decoders import Request, Sampling, load_decoder
from tot.decoders.engine.recording import recording
from tot.decoders.kernels import graphs
from tot.decoders.kernels.attention import attend_blocks, make_blocks
from tot.decoders.kernels.graphs import GraphedStep, cut_rows
from tot.decoders.kernels.native.shared_prefixes import Run

CPU = torch.device("cpu")


def runs_of(*shapes: tuple[int, int]) -> list[Run]:
    """Return runs of the given (length, new rows). The first half of each is a prefix of the first run."""
    first = np.arange(1, 1 + max(length for length, _ in shapes), dtype=np.int32)
    paths = [
        np.concatenate([first[: length // 2], 100 * (i + 1) + np.arange(length - length // 2)])
        for i, (length, _) in enumerate(shapes)
    ]
    return [Run(path.astype(np.int32), length - rows) for path, (length, rows) in zip(paths, shapes, strict=True)]


@pytest.mark.parametrize("window", [None, 7])
@pytest.mark.parametrize("shapes", [[(1, 1)], [(40, 1), (41, 1), (60, 1)], [(30, 4), (9, 1), (50, 6)]])
def test_separate_rows_attend_to_the_same_keys_as_blocks(shapes: list[tuple[int, int]], window: int | None) -> None:
    torch.manual_seed(0)
    runs = runs_of(*shapes)
    order, blocks = make_blocks(runs, 2, torch.float32, CPU, window)
    rows = cut_rows([runs[i] for i in order])
    assert rows is not None
    count = sum(run.rows for run in runs)
    step = GraphedStep(rows.slots.shape, window, torch.float32, CPU)
    step.load(torch.zeros((3, count), dtype=torch.int64), torch.arange(count), rows)
    keys, values = torch.randn(2, 2, 800, 16)
    query = torch.randn(4, len(rows.lengths), 16)
    whole = attend_blocks(query[:, :count], keys, values, blocks, 0.3)
    apart = attend_blocks(query, keys, values, step.pieces()[window], 0.3)
    torch.testing.assert_close(apart[:count], whole, atol=1e-6, rtol=0)
    assert apart.isfinite().all()


def test_shapes_are_powers_of_two_and_large_forwards_have_no_shape() -> None:
    assert [cut_rows(runs_of((length, rows))).slots.shape for length, rows in ((1, 1), (300, 3), (513, 64))] == [
        (1, 256),
        (4, 512),
        (64, 1024),
    ]
    assert cut_rows(runs_of((65, 65))) is None
    assert cut_rows(runs_of(*[(4097, 1)] * 64)) is None


def test_larger_keys_allow_fewer_rows() -> None:
    limit = 2**28  # bytes of keys and values, padded to powers of two
    for bytes_a_key in (256, 1024, 16_384):
        fits, more = limit // bytes_a_key // 16, 2 * limit // bytes_a_key // 16
        assert cut_rows(runs_of(*[(fits, 1)] * 16), bytes_a_key) is not None
        assert cut_rows(runs_of(*[(more, 1)] * 16), bytes_a_key) is None


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("family", ["llama", "gemma2", "gemma3_text"])
def test_graphs_write_the_same_texts_as_plain_forwards(
    family: str, make_model: Callable[..., Any], tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = [
        Request(prompt=f"the {i} in an {'ab ' * i}", sampling=Sampling(n=3, temperature=1.0, max_tokens=60, seed=i))
        for i in range(3)
    ]

    def texts(method: str) -> list[Any]:
        model = make_model(family, readable=True)
        with load_decoder(method, model, tokenizer=tokenizer, device="cuda", kv_budget=6000) as decoder:
            first = decoder.generate(requests)
            with recording(decoder.engine) as timeline:  # recording disables graphs, so that parts can be timed
                again = decoder.generate(requests)
            assert any(span.kind == "attention" for span in timeline.spans)
            assert [one.tokens for one in again] == [one.tokens for one in first]
            return [one.tokens for one in first]

    captured = []
    capture = graphs.Graphs._capture
    monkeypatch.setattr(graphs.Graphs, "_capture", lambda *given: captured.append(1) or capture(*given))
    quick = {method: texts(method) for method in ("ar", "sd", "seed")}
    assert captured
    monkeypatch.setattr(graphs, "_ASKED", 10**9)
    plain = texts("ar")
    assert quick == dict.fromkeys(quick, plain)
