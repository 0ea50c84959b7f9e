"""SEED: closing a decoder ends its own requests and no others."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from tot.decoders import Completion, Request, RequestError, load_decoder

LONG = "The sum of 10 and 11 is in the range on and on, and the other one: "
ROUNDS: dict[str, Any] = {"policy": "rounds", "adapt": False, "k_config": (2, 1)}
BESIDE = {**ROUNDS, "overlap": True}


def test_closing_ends_the_drafting_thread(
    bench: Any, watching: Any, branches: Callable[..., list[Request]], results: Callable[..., list[Completion]]
) -> None:
    watched = watching()
    decoder = bench.seed(watched, **BESIDE)
    decoder.generate(branches(2))
    decoder.close()
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("tot-draft")]
    with pytest.raises(RequestError, match="this decoder is closed: make a new one"):
        results(decoder.submit(branches(1)))


@pytest.mark.parametrize("overlap", [True, False])
def test_closing_a_decoder_keeps_a_shared_engine_open(
    bench: Any,
    overlap: bool,
    watching: Any,
    branches: Callable[..., list[Request]],
    plain: Callable[..., Request],
    results: Callable[..., list[Completion]],
) -> None:
    """The decoder's running requests are cancelled. Requests of other decoders continue."""
    engine = bench.engine()
    decoder = bench.seed(watching(), engine, **ROUNDS, overlap=overlap)
    other = load_decoder(engine=engine)
    kept = other.submit(branches(2, tokens=150))
    lost = decoder.submit([plain(LONG, max_tokens=900)], stream=True)
    next(iter(lost[0]))
    decoder.close()
    assert [completion.finish_reason for completion in lost[0].result(0)] == ["cancelled"]
    assert [completion.tokens for completion in results(kept)] == bench.expected(branches(2, tokens=150))
    assert [completion.tokens for completion in other.generate(branches(2))] == bench.expected(branches(2))
