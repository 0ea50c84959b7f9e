"""Small forwards row by row: the inputs of a captured CUDA graph, and graphs on a GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest
import torch

from tot.decoders import LocalDecoder, Request, Sampling, load_decoder
from tot.decoders.engine.recording import recording
from tot.decoders.kernels import backend as kernels_backend
from tot.decoders.kernels import graphs, module
from tot.decoders.kernels.attention import attend_blocks, make_blocks
from tot.decoders.kernels.graphs import GraphedStep, cut_rows
from tot.decoders.kernels.module import TransformersForward
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
    step.load(np.zeros((3, count), dtype=np.int64), np.arange(count), rows)
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


class Replay:
    """Computes a step again into the same buffer, as a CUDA graph does."""

    def __init__(self, again: Callable[[], torch.Tensor]) -> None:
        self.again, self.logits = again, again()

    def replay(self) -> None:
        self.logits.copy_(self.again())


class ReplayedGraphs(graphs.Graphs):
    """Graphs on the CPU, each of which takes a quarter of the pool."""

    def __init__(self, backend: TransformersForward, error: Exception | None = None) -> None:
        super().__init__(backend._compute, backend._window, torch.float32, CPU, 1024)
        self.error = error
        self.held: list[int] = []
        """Number of graphs held before each capture."""

    def _capture(self, step: GraphedStep) -> graphs.Captured:
        if self.error is not None:
            raise self.error
        replay = Replay(lambda: step.compute(self._compute)[0].clone())
        self._pool_bytes += 2**28
        self.held.append(len(self._captured))
        return graphs.Captured(step, replay, replay.logits)  # type: ignore[arg-type]


@pytest.fixture
def replayed(
    make_model: Callable[..., Any], tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., tuple[LocalDecoder, ReplayedGraphs]]]:
    """Open a decoder of a family whose small forwards are replayed on the CPU."""
    monkeypatch.setattr(kernels_backend, "native_forward", lambda *given: None)
    monkeypatch.setattr(module, "kernel_for", lambda *given: None)
    with ExitStack() as stack:

        def make(family: str, error: Exception | None = None) -> tuple[LocalDecoder, ReplayedGraphs]:
            model = make_model(family, readable=True)
            decoder = stack.enter_context(load_decoder("ar", model, tokenizer=tokenizer, kv_budget=6000))
            backend = decoder.engine.runner.backend
            assert isinstance(backend, TransformersForward)
            made = backend._graphs = ReplayedGraphs(backend, error)
            return decoder, made

        yield make


REQUESTS = [
    Request(prompt=f"the {i} in an {'ab ' * i}", sampling=Sampling(n=3, temperature=1.0, max_tokens=20, seed=i))
    for i in range(3)
]


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_replayed_steps_write_the_same_texts_as_plain_forwards(
    family: str, replayed: Callable[..., tuple[LocalDecoder, ReplayedGraphs]], monkeypatch: pytest.MonkeyPatch
) -> None:
    decoder, made = replayed(family)
    texts = [one.tokens for one in decoder.generate(REQUESTS)]
    assert made.held
    monkeypatch.setattr(graphs, "_WARMUP_FORWARDS", 10**9)
    decoder.engine.reset()
    count = len(made.held)
    assert [one.tokens for one in decoder.generate(REQUESTS)] == texts
    assert len(made.held) == count


def test_graphs_are_dropped_once_they_take_more_than_their_pool(
    replayed: Callable[..., tuple[LocalDecoder, ReplayedGraphs]],
) -> None:
    decoder, made = replayed("llama")
    made._pool_bytes = graphs._POOL_BYTES - 2**28
    for samples in (1, 2, 4, 8, 16):  # each a shape of its own
        sampling = Sampling(n=samples, max_tokens=6, temperature=1.0, ignore_eos=True)
        decoder.generate([Request(prompt="an", sampling=sampling)])
    assert made.held[:3] == [0, 1, 0]  # the first two fill the pool
    assert made.held[3:] == [*range(1, len(made.held) - 2)]
    assert made._pool_bytes == (len(made.held) - 2) * 2**28


def test_a_failed_capture_costs_no_request(replayed: Callable[..., tuple[LocalDecoder, ReplayedGraphs]]) -> None:
    decoder, made = replayed("llama", RuntimeError("CUDA out of memory"))
    texts = [one.tokens for one in decoder.generate(REQUESTS)]
    assert made._failed
    assert made.cut(runs_of((40, 1))) is None
    decoder.engine.reset()
    assert [one.tokens for one in decoder.generate(REQUESTS)] == texts


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
    monkeypatch.setattr(graphs, "_WARMUP_FORWARDS", 10**9)
    plain = texts("ar")
    assert quick == dict.fromkeys(quick, plain)
