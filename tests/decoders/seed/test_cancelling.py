"""SEED: a cancelled or failed request does not affect the others."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest

from tot.decoders import Budget, Completion, Meter, ModelError, Request, load_decoder

LONG = "The sum of 10 and 11 is in the range on and on, and the other one: "
ROUNDS: dict[str, Any] = {"policy": "rounds", "adapt": False, "k_config": (2, 1)}
BESIDE = {**ROUNDS, "overlap": True}


@pytest.mark.parametrize("overlap", [True, False])
def test_cancelling_does_not_affect_other_requests(
    bench: Any,
    overlap: bool,
    plain: Callable[..., Request],
    branches: Callable[..., list[Request]],
    results: Callable[..., list[Completion]],
) -> None:
    decoder = bench.seed(bench.model_drafter(0.02), **ROUNDS, overlap=overlap)
    endless = plain(LONG, max_tokens=800, n=3, temperature=1.0)
    (cancelled,) = decoder.submit([endless], stream=True)
    kept = decoder.submit(branches(3, tokens=40))
    next(iter(cancelled))
    cancelled.cancel()
    assert {completion.finish_reason for completion in cancelled.result(30)} == {"cancelled"}
    assert 0 < sum(len(completion.tokens) for completion in cancelled.result()) < 3 * 800
    assert [completion.tokens for completion in results(kept)] == bench.expected(branches(3, tokens=40))


def test_a_request_can_be_cancelled_while_its_draft_is_computed(
    bench: Any, watching: Any, branches: Callable[..., list[Request]], results: Callable[..., list[Completion]]
) -> None:
    watched = watching()
    watched.go_on.clear()
    decoder = bench.seed(watched, **BESIDE)
    cancelled = decoder.submit(branches(3))
    while not watched.asked:
        time.sleep(0.001)
    for handle in cancelled:
        handle.cancel()
    watched.go_on.set()
    assert {completion.finish_reason for completion in results(cancelled)} == {"cancelled"}
    again = [completion.tokens for completion in decoder.generate(branches(3))]
    assert again == bench.expected(branches(3))


def test_the_engine_keeps_running_while_all_of_a_decoders_drafts_are_pending(
    bench: Any, watching: Any, branches: Callable[..., list[Request]], plain: Callable[..., Request]
) -> None:
    """An endless draft blocks no other request, can be cancelled, and ends with its budget."""
    watched = watching()
    decoder = bench.seed(watched, **BESIDE)
    watched.go_on.clear()
    (cancelled,) = decoder.submit([plain(LONG)])
    (poor,) = decoder.submit([plain(LONG)], Meter(Budget(seconds=0.2)))
    while not watched.asked:
        time.sleep(0.001)
    other = load_decoder(engine=decoder.engine)
    handles = other.submit(branches(2))
    assert [one.tokens for handle in handles for one in handle.result(30)] == bench.expected(branches(2))
    assert [one.finish_reason for one in poor.result(30)] == ["budget"]
    cancelled.cancel()
    assert [one.finish_reason for one in cancelled.result(30)] == ["cancelled"]
    watched.go_on.set()


@pytest.mark.parametrize("options", [ROUNDS, BESIDE, {"policy": "packed"}])
def test_a_drafter_that_fails_fails_its_requests_only(
    bench: Any,
    options: dict[str, Any],
    watching: Any,
    branches: Callable[..., list[Request]],
    results: Callable[..., list[Completion]],
) -> None:
    watched = watching()
    decoder = bench.seed(watched, **options)
    other = load_decoder(engine=decoder.engine)
    running = other.submit(branches(2, tokens=100))
    watched.fails = True
    for handle in decoder.submit(branches(3)):
        with pytest.raises(ModelError, match="decoding failed: ZeroDivisionError: no draft today"):
            handle.result(30)
    assert [completion.tokens for completion in results(running)] == bench.expected(branches(2, tokens=100))
    watched.fails = False
    assert [one.tokens for one in results(decoder.submit(branches(3)))] == bench.expected(branches(3))
