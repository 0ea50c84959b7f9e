"""Speculative decoding: shared engines, streams, cancelling and budgets."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tot.decoders import Budget, Meter, Request

LONG = "The sum of 10 and 11 is in the range on and on, and the other one: " * 2


def test_methods_on_one_engine_share_its_forwards(
    bench: Any,
    mixed_requests: Callable[..., list[Request]],
    plain: Callable[..., Request],
    assert_same: Callable[..., None],
    drafted: Callable[..., int],
) -> None:
    requests = [plain(p, max_tokens=30, temperature=t, n=2) for p in ("abc", LONG) for t in (0.0, 1.0)]
    requests += mixed_requests(8, seed=5)
    expected = bench.ar().generate(requests)
    engine = bench.engine(6000)
    decoders = [
        bench.ar(engine),
        bench.speculative("sd", "near", engine),
        bench.speculative("mcsd", "far", engine),
        bench.speculative("sd", "lookup", engine, k=6),
        *(bench.speculative("seed", "near", engine, policy="rounds", overlap=overlap) for overlap in (False, True)),
    ]
    handles = [decoder.submit(requests) for decoder in decoders]
    results = [[completion for handle in some for completion in handle.result(60)] for some in handles]
    for got in results:
        assert_same(got, expected)
    assert [drafted(got) > 0 for got in results] == [False, *[True] * 5]


@pytest.mark.parametrize("draft", ["same", "near", "lookup"])
def test_streamed_pieces_join_to_the_text(bench: Any, draft: str, mixed_requests: Callable[..., list[Request]]) -> None:
    requests = mixed_requests(12, seed=6)
    expected = iter(bench.ar().generate(requests))
    for request, handle in zip(requests, bench.speculative("sd", draft).submit(requests, stream=True), strict=True):
        texts = [""] * request.sampling.n
        for sample, piece in handle:
            texts[sample] += piece
        assert texts == [next(expected).text for _ in texts]


@pytest.mark.parametrize(
    ("budget", "tokens"), [(Budget(tokens=11), 15), (Budget(forwards=3), 15), (Budget(tokens=0), 0)]
)
def test_a_reached_budget_ends_a_text(bench: Any, budget: Budget, tokens: int, plain: Callable[..., Request]) -> None:
    """Budgets are checked between forwards. The forward that reaches the limit still returns all of its five tokens."""
    meter = Meter(budget)
    (handle,) = bench.speculative("sd", "same", k=4).submit([plain(max_tokens=50)], meter)
    (got,) = handle.result(30)
    assert (got.finish_reason, len(got.tokens)) == ("budget", tokens)
    assert got.tokens == bench.ar().generate([plain(max_tokens=50)])[0].tokens[:tokens]
    assert (meter.new_tokens, meter.forwards) == (tokens, tokens // 5)
